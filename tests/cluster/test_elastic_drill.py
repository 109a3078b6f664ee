"""benchmarks/elastic_drill.py: its plan, and what it holds against a run."""

import json
from itertools import islice

import pytest

from benchmarks import elastic_drill

HOSTS = ["node1", "node2", "node3", "node4"]


def test_a_seed_stands_for_a_plan():
    """Hosts that are there leave, hosts that are away join; all kinds come."""
    changes = list(islice(elastic_drill.plan(7, HOSTS), 200))
    assert changes == list(islice(elastic_drill.plan(7, HOSTS), 200))
    assert changes != list(islice(elastic_drill.plan(8, HOSTS), 200))
    assert {change.kind for change in changes} == {"cut", "kill", "leave", "join"}
    present = set(HOSTS)
    for change in changes:
        assert (change.host in present) == (change.kind != "join")
        present ^= {change.host}
        assert len(present) >= 1
        assert 60 <= change.gap <= 160


def test_the_end_of_a_log_that_is_being_written(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert elastic_drill.tail(file) == []
    lines = [json.dumps({"step": step}) for step in range(1000)]
    file.write_text("\n".join([*lines, '{"step": 10']))
    assert elastic_drill.tail(file, size=100)[-1] == {"step": 999}
    assert len(elastic_drill.tail(file, size=100)) < 10


GOOD = {"replays": 5, "ids": True, "lr": True, "replay": 4e-6, "whole": 0.01, "bound": 0.02}
GOOD |= {"lost_signalled": 0, "lost_killed": 64}


BAD = {"replays": 0, "ids": False, "lr": False, "replay": 2e-5, "whole": 0.03, "lost_signalled": 1}
BAD |= {"lost_killed": 65}


@pytest.mark.parametrize("name", BAD)
def test_each_bound_counts(name):
    assert elastic_drill.holds(GOOD)
    assert not elastic_drill.holds(GOOD | {name: BAD[name]})
