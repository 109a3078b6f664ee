"""Comparisons over seeds: the statistics against scipy and against draws, and the page of a comparison."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.logbook import test_logbook
from tests.logbook.test_logbook import check, experiment, rows
from tools.logbook.seeds import Group, compare, seeds_needed, verdict

RECIPE = {"data": "digits", "epochs": 1, "batch_size": 64, "lr": 0.003, "seed": 0}


book = test_logbook.book  # a fixture


def group(name: str, values, seeds=None) -> Group:
    seeds = range(len(values)) if seeds is None else seeds
    return Group(name, dict(zip(seeds, map(float, values), strict=True)), ())


def test_the_interval_is_scipys():
    values = [0.91, 0.93, 0.92, 0.95]
    one = group("a", values)
    expected = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert one.interval == pytest.approx(expected)
    assert one.deviation == pytest.approx(np.std(values, ddof=1))
    assert (group("a", [0.9]).interval, group("a", [0.9]).deviation) == (None, None)


def test_pairs_of_equal_seeds_and_welchs_test_of_others():
    draws = np.random.RandomState(0).normal(0.9, 0.01, (2, 5))
    draws[1] += 0.01
    paired = compare(group("a", draws[0]), group("b", draws[1]))
    expected = stats.ttest_rel(draws[1], draws[0])
    assert (paired.p, paired.is_paired) == (pytest.approx(expected.pvalue), True)
    assert paired[1:3] == pytest.approx(tuple(expected.confidence_interval()))
    welch = compare(group("a", draws[0]), group("b", draws[1][:4], seeds=(5, 6, 7, 8)))
    expected = stats.ttest_ind(draws[1][:4], draws[0], equal_var=False)
    assert (welch.p, welch.is_paired) == (pytest.approx(expected.pvalue), False)
    assert welch[1:3] == pytest.approx(tuple(expected.confidence_interval()))
    assert paired.mean == pytest.approx(np.mean(draws[1]) - np.mean(draws[0]))


@pytest.mark.parametrize("is_paired", [True, False])
def test_200_comparisons_find_a_planted_difference_and_no_other(is_paired):
    """5 runs against 5: finds 5 percent without a difference, 96 or more with one of 3 deviations."""
    random = np.random.RandomState(1)
    for planted, least, most in ((0.0, 0.0, 0.1), (0.03, 0.92, 1.0)):
        found = 0
        for _ in range(200):
            first, second = random.normal(0.9, 0.01, (2, 5))
            seeds = range(5) if is_paired else range(5, 10)
            difference = compare(group("a", first), group("b", second + planted, seeds))
            found += difference.is_found
        assert least <= found / 200 <= most, (planted, found)


@pytest.mark.parametrize(("effect", "is_paired"), [(1.0, True), (0.5, True), (1.0, False), (0.7, False)])
def test_the_seeds_that_are_said_to_tell_do(effect, is_paired):
    """Four times out of five: of 1,000 draws with so many seeds, and less often with fewer."""
    random, seeds = np.random.RandomState(2), seeds_needed(effect, is_paired)
    share = {}
    for count in (seeds, seeds // 2):
        if is_paired:
            p = stats.ttest_1samp(random.normal(effect, 1, (1000, count)), 0, axis=1).pvalue
        else:
            first, second = random.normal(0, np.sqrt(0.5), (2, 1000, count))
            p = stats.ttest_ind(second + effect, first, axis=1, equal_var=False).pvalue
        share[count] = (p < 0.05).mean()
    assert 0.76 < share[seeds] < 0.88, share
    assert share[seeds // 2] < 0.7, share


def test_verdicts():
    low, high = group("a", [0.90, 0.91, 0.92]), group("b", [0.95, 0.96, 0.98])
    assert verdict(low, high).startswith("b is better than a with n = 3 (+0.0533, 95 %: ")
    assert verdict(high, low).startswith("a is worse than b with n = 3 (-0.0533, ")
    said = verdict(low, group("c", [0.92, 0.90, 0.93]))
    assert re.match(
        r"c and a are not distinguishable with n = 3 \(\+0.0067, .*\); some \d+ seeds of each would tell",
        said,
    )
    assert "paired t-test" in said
    assert "n = 2 and 3" in verdict(low, group("d", [0.9, 0.95]))
    assert "Welch t-test" in verdict(low, group("d", [0.9, 0.95]))
    assert verdict(low, group("e", [0.9])).endswith("no test, a single run says nothing about the seeds.")
    assert verdict(low, low).endswith("no test, each pair differs by the same amount.")


def make_run(folder: Path, seed: int, accuracy: float, **changes) -> Path:
    """A finished run as its files say."""
    folder.mkdir(parents=True)
    about = {"script": "train_cnn_a", "strategy": "single", "source": "digits-1", "unit": "images"}
    about |= {"hosts": ["h"], "devices": ["CPU (x86_64)"], "recipe": RECIPE | {"seed": seed} | changes}
    facts = {"script": "train_cnn_a", "status": "finished", "strategy": "single", "hosts": 1, "processes": 1}
    facts |= {"final_accuracy": accuracy, "best_accuracy": accuracy, "val_name": "val", "val_images": 360}
    facts |= {"data": "digits", "wall_s": 10.0 + seed, "images_per_s": 100.0, "seed": seed}
    lines = [
        {"step": step, "epoch": 1.0, "wall_s": float(step), "train/loss": 2.0 / step} for step in (1, 2, 3)
    ]
    lines.append({"step": 3, "epoch": 1.0, "wall_s": 3.0, "val/loss": 1.0, "val/accuracy": accuracy})
    (folder / "recipe.json").write_text(json.dumps(about))
    (folder / "result.json").write_text(json.dumps(facts))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def compared(book, tmp_path: Path, runs: list[Path]) -> tuple[int, str, str]:
    """The exit status, the page if there is one, and the errors."""
    status, _, errors = book("compare", *runs, "--name", "page")
    file = tmp_path / "book" / "compare" / "page.md"
    return status, file.read_text() if file.exists() else "", errors


def test_a_page_over_seeds(book, tmp_path):
    values = {0.003: (0.90, 0.91, 0.93), 0.01: (0.92, 0.94, 0.95)}
    runs = [
        make_run(tmp_path / f"{lr}_{seed}", seed, value, lr=lr)
        for lr, found in values.items()
        for seed, value in enumerate(found)
    ]
    status, text, _ = compared(book, tmp_path, runs)
    assert status == 0
    check(tmp_path / "book" / "compare" / "page.md")
    assert rows(text)["lr 0.003"] == ["3", "0, 1, 2", "0.9133", "0.0153", "0.8754 to 0.9513"]
    assert rows(text)["lr 0.01"][:3] == ["3", "0, 1, 2", "0.9367"]
    assert "- lr 0.01 is better than lr 0.003 with n = 3 (+0.0233, 95 %: +0.0090 to +0.0377; paired" in text
    assert "<summary>Each run</summary>" in text


def test_runs_of_one_recipe_and_seed_are_no_sample(book, tmp_path):
    """The same training twice is compared as two runs; among several seeds it is refused."""
    same = [make_run(tmp_path / f"same{k}", 0, 0.9) for k in range(2)]
    status, text, _ = compared(book, tmp_path, same)
    assert (status, "Over seeds" in text) == (0, False)
    status, _, errors = compared(book, tmp_path, [*same, make_run(tmp_path / "other", 1, 0.91)])
    assert status == 1
    assert f"{same[0]} and {same[1]} have the same recipe and seed 0: name one of them" in errors


@pytest.mark.parametrize(
    ("flags", "variables"),
    [((), {"SEEDS": 3}), (("--seeds", 3), {}), (("--seeds=3",), {"SEEDS": 7})],
)
def test_an_experiment_with_several_seeds_shows_its_commands(flags, variables, tmp_path):
    status, output = experiment("speedup", tmp_path, *flags, DRY_RUN=1, **variables).wait()
    assert status == 0, output
    trainings = re.findall(r"# training, (\S+)\n(.*)", output)
    names = [f"{c}{s}" for c in ("single_gpu", "ddp_2gpu", "ddp_4gpu") for s in ("", "_seed1", "_seed2")]
    assert [name for name, _ in trainings] == names
    assert ["--seed=2" in command for _, command in trainings] == [False, False, True] * 3
    assert re.search(r"logbook.py compare .*single_gpu \S*single_gpu_seed1 \S*single_gpu_seed2 ", output)


@pytest.mark.parametrize(
    ("flags", "variables", "said"),
    [
        ((), {"SEEDS": "some"}, "error: SEEDS=some: a number of runs, as 5"),
        (("--seeds", "0"), {}, "error: --seeds 0: a number of runs, as 5"),
        (("--seeds=some",), {"SEEDS": 3}, "error: --seeds some: a number of runs, as 5"),
        (("--seeds",), {}, "error: --seeds : a number of runs, as 5"),
        (
            ("--seed", "3"),
            {},
            "error: --seed: the only flag is --seeds N; experiments/steps.sh has the variables",
        ),
    ],
)
@pytest.mark.parametrize("name", ["vit", "speedup"])
def test_a_wrong_number_of_seeds_is_refused(name, flags, variables, said, tmp_path):
    status, output = experiment(name, tmp_path / "runs", *flags, **variables).wait()
    assert (status, output) == (2, f"{said}\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
def test_an_experiment_goes_on_at_its_next_seed(tmp_path):
    """Two seeds have ended, the third's folder is in the way: the next start trains no seed twice."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "single_gpu_seed2").write_text("in the way")
    start = {"DATA": "digits", "SEEDS": 3, "LOGBOOK": tmp_path / "book"}
    status, output = experiment("speedup", tmp_path / "runs", **start).wait(600)
    assert (status, "error: training, single_gpu_seed2 failed" in output) == (1, True), output
    (tmp_path / "runs" / "single_gpu_seed2").unlink()
    status, output = experiment("speedup", tmp_path / "runs", **start).wait(900)
    assert status == 0, output
    assert output.count("done already") == 2
    text = (tmp_path / "book/compare/experiment_speedup_rehearsal.md").read_text()
    assert rows(text)["single x 1"][:2] == ["3", "0, 1, 2"]
    assert "ddp x 2 and single x 1 are not distinguishable" in text or "ddp x 2 is " in text
