"""Which hosts a run has: those that answer, each in its own part, spare ones for the lost, after a wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import pytest

from stagewright.errors import RunError, UsageError
from stagewright.runtime.launch.members import Members
from stagewright.runtime.launch.ssh import OverSsh


@dataclass(frozen=True)
class Named(OverSsh):
    """Hosts of which some are away, as a list says that the test changes."""

    away: list[str] = field(default_factory=list)

    def lost(self) -> list[int]:
        return [number for number, name in enumerate(self.names) if name in self.away]


def members(
    names: str,
    away: str = "",
    *,
    wait_s: float = 0.0,
    check: Callable[[OverSsh, Collection[int], int], None] | None = None,
) -> tuple[Members, list[str]]:
    """Members of a run for two to three hosts, and what they tell."""
    told: list[str] = []
    known = Named(tuple(names), away=list(away))
    return Members(known, (2, 3), wait_s, check or (lambda hosts, missing, port: None), told.append), told


@pytest.mark.parametrize(
    ("names", "away", "there", "missing"),
    [
        ("abc", "", "abc", []),
        ("abcd", "", "abc", []),
        ("abcd", "b", "adc", []),
        ("abcd", "bd", "ac", [1]),
        ("abcde", "ab", "dec", []),
    ],
)
def test_spare_hosts_play_the_parts_of_the_lost(names: str, away: str, there: str, missing: list[int]) -> None:
    made, _ = members(names, away)
    made.gather()
    assert ("".join(made.hosts.names), made.missing) == (there, missing)


def test_too_few_end_the_run_after_the_wait_and_are_named() -> None:
    made, told = members("abc", "bc", wait_s=0.5)
    with pytest.raises(RunError, match="1 hosts answer, and --nnodes asks for 2 at least: b, c do not"):
        made.gather()
    assert told == ["waiting for b, c, up to 0.5 s"]


def test_one_that_comes_back_is_waited_for() -> None:
    made, told = members("abc", "c", wait_s=30.0)
    timer = threading.Timer(0.3, made.known.away.clear)  # type: ignore[attr-defined]
    timer.start()
    made.gather()
    assert (made.missing, told) == ([], ["waiting for c, up to 30 s"])


def test_hosts_that_come_while_the_run_goes_on_are_seen_once_they_can_take_part() -> None:
    """The first look finds a host that lacks the data, which is told; the second one takes it."""
    refusals = ["host c has no /data"]

    def check(hosts: OverSsh, missing: Collection[int], port: int) -> None:
        if not missing and refusals:
            raise UsageError(refusals.pop())

    made, told = members("abc", "c", check=check)
    made.gather()
    seen = threading.Event()
    with made.watching(seen.set):
        made.known.away.clear()  # type: ignore[attr-defined]
        assert seen.wait(20)
    assert made.has_grown
    assert told == ["a host is there that cannot take part: host c has no /data"]


def test_more_hosts_than_are_named_cannot_be_asked_for() -> None:
    with pytest.raises(UsageError, match="--nodes names 2 hosts, but --nnodes up to 3"):
        members("ab")
