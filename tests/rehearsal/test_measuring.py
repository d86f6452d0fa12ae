"""What is told of hosts by what they measured."""

from __future__ import annotations

import pytest

from stagewright.cluster import find_cluster
from stagewright.rehearsal.measuring import crowding

FEW, NONE = 1.0, 0.0


def test_taking_turns_is_told_by_passes_of_few_hosts_and_of_all() -> None:
    """Four hosts on two cores: twice as long and a tenth more; a machine slow in one round is so for both passes."""
    speeds = (1.0, 1.5, 1.0)
    turns = [[(few * slow, 2.2 * slow) for slow in speeds] for few in (FEW, FEW, NONE, NONE)]
    assert crowding(find_cluster("hosts-4"), turns) == pytest.approx(1.1)


def test_turns_that_cost_nothing_are_no_gain() -> None:
    assert crowding(find_cluster("hosts-4"), [[(1.0, 1.9)], [(1.0, 1.9)], [(0.0, 1.9)], [(0.0, 1.9)]]) == 1.0


def test_hosts_with_cores_enough_keep_what_their_file_says() -> None:
    assert crowding(find_cluster("hosts-8"), []) == find_cluster("hosts-8").crowding
