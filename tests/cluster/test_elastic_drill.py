"""benchmarks/elastic_drill.py: its plan, and what it holds against a run."""

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


GOOD = {"replays": 5, "ids": True, "lr": True, "replay": 4e-6, "whole": 0.01, "bound": 0.02}
GOOD |= {"lost_signalled": 0, "lost_killed": 64, "weights": False}
EXACT = GOOD | {"replay": 0.0, "whole": 0.0, "bound": 0.0, "weights": True}
BAD = {"replays": 0, "ids": False, "lr": False, "replay": 2e-5, "whole": 0.03, "lost_signalled": 1}
BAD |= {"lost_killed": 65, "bound": 0.0}


@pytest.mark.parametrize("name", BAD)
def test_each_bound_counts(name):
    assert elastic_drill.holds(GOOD)
    assert elastic_drill.holds(EXACT)
    assert not elastic_drill.holds(EXACT | {"weights": False})
    assert not elastic_drill.holds(GOOD | {name: BAD[name]})
