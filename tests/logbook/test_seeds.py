"""Tests of comparisons over seeds: their pages, and statistics checked with scipy and simulated draws."""

import re

import numpy as np
import pytest
from scipy import stats

from tests.logbook.pages import is_golden, rows, write_run
from tests.logbook.test_logbook import page_of
from tools.logbook.seeds import RunGroup, compare_groups, seed_verdict


def group(name: str, values, seeds=None) -> RunGroup:
    seeds = range(len(values)) if seeds is None else seeds
    return RunGroup(name, dict(zip(seeds, map(float, values), strict=True)), ())


def test_the_interval_matches_scipy():
    values = [0.91, 0.93, 0.92, 0.95]
    group_of_runs = group("a", values)
    expected = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert group_of_runs.mean_interval == pytest.approx(expected)
    assert group_of_runs.standard_deviation == pytest.approx(np.std(values, ddof=1))
    assert group("a", [1.0, 0.0]).mean_interval == (0.0, 1.0)  # An accuracy's interval is clipped to [0, 1]
    assert (group("a", [0.9]).mean_interval, group("a", [0.9]).standard_deviation) == (None, None)


def test_pairs_of_equal_seeds_and_welchs_test_of_others():
    draws = np.random.RandomState(0).normal(0.9, 0.01, (2, 5))
    draws[1] += 0.01
    paired = compare_groups(group("a", draws[0]), group("b", draws[1]))
    expected = stats.ttest_rel(draws[1], draws[0])
    assert (paired.p_value, paired.is_paired) == (pytest.approx(expected.pvalue), True)
    assert paired[1:3] == pytest.approx(tuple(expected.confidence_interval()))
    welch = compare_groups(group("a", draws[0]), group("b", draws[1][:4], seeds=(5, 6, 7, 8)))
    expected = stats.ttest_ind(draws[1][:4], draws[0], equal_var=False)
    assert (welch.p_value, welch.is_paired) == (pytest.approx(expected.pvalue), False)
    assert welch[1:3] == pytest.approx(tuple(expected.confidence_interval()))
    assert paired.mean == pytest.approx(np.mean(draws[1]) - np.mean(draws[0]))


def test_verdicts():
    low, high = group("a", [0.90, 0.91, 0.92]), group("b", [0.95, 0.96, 0.98])
    assert seed_verdict(low, high).startswith("b is better than a with n = 3 (+0.0533, 95 %: ")
    assert seed_verdict(high, low).startswith("a is worse than b with n = 3 (-0.0533, ")
    assert re.fullmatch(
        r"c and a are not distinguishable with n = 3 \(\+0.0067, .*; paired t-test, p = 0.\d\d\).",
        seed_verdict(low, group("c", [0.92, 0.90, 0.93])),
    )
    assert "n = 2 and 3" in seed_verdict(low, group("d", [0.9, 0.95]))
    assert "Welch t-test" in seed_verdict(low, group("d", [0.9, 0.95]))
    alone, equal = (
        "a single run does not show the variation between seeds.",
        "all pairs of runs differ by the same amount.",
    )
    assert seed_verdict(low, group("e", [0.9])).endswith(f"compared with a test, because {alone}")
    assert seed_verdict(low, low).endswith(f"compared with a test, because {equal}")


def make_run(folder, seed: int, accuracy: float, lr: float = 0.003):
    recipe = {"seed": seed, "lr": lr, "name": folder.name}
    return write_run(folder, recipe=recipe, final_accuracy=accuracy, best_accuracy=accuracy)


def test_a_page_over_seeds(book, tmp_path):
    values = {0.003: (0.90, 0.91, 0.93), 0.01: (0.92, 0.94, 0.95)}
    trainings = [(lr, *run) for lr, accuracies in values.items() for run in enumerate(accuracies)]
    runs = [make_run(tmp_path / f"{lr}_{seed}", seed, value, lr) for lr, seed, value in trainings]
    assert is_golden("seeds.md", page_of(book, "compare", *runs, "--name", "page"), tmp_path)


def test_runs_of_one_recipe_and_seed_are_no_sample(book, tmp_path):
    """Check that two copies of a training run are compared as two runs, but refused among several seeds."""
    same = [make_run(tmp_path / f"same{k}", 0, 0.9) for k in range(2)]
    assert "Over seeds" not in page_of(book, "compare", *same, "--name", "page")
    status, _, errors = book("compare", *same, make_run(tmp_path / "other", 1, 0.91))
    assert status == 1
    assert f"{same[0]} and {same[1]} have the same recipe and seed 0. Pass only one of these runs." in errors


def test_a_page_over_folds(book, tmp_path):
    """Check Student's t intervals. A standard error is sqrt(1/3 + 1/2) standard deviations (Nadeau and
    Bengio).
    """
    runs = []
    for model, accuracies in {"vit_a": (0.8, 0.75, 0.7), "vit_b": (0.5, 0.75, 0.2)}.items():
        for fold, accuracy in enumerate(accuracies, 1):
            facts = {"final_accuracy": accuracy, "test_accuracy": 0.1, "val_images": 5 if fold == 3 else 4}
            recipe = {"holdout": f"{fold}/3", "model": model}
            runs.append(write_run(tmp_path / f"{model}{fold}", recipe=recipe, **facts))
    keys = "0 and fold 1/3, 0 and fold 2/3, 0 and fold 3/3"
    expected = ["3", keys, "0.7500", "0.0500", "0.5536 to 0.9464", "0.7462"]
    assert rows(page_of(book, "compare", *runs, "--name", "page"))["model vit_a"] == expected
    assert rows(page_of(book, "compare", *runs[:2], "--name", "page"))["ddp x 2"][-1] == "-"
