"""Which of the hosts that a run may use are there: those that are lost are waited for, new ones are seen.

hosts a, b, c, d, seats for three       all are there        a b c
                                        without b            a d c       a spare one takes a seat that is free
                                        without b and d      a – c       the plan is made without host 1
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from stagewright.errors import RunError, StagewrightError, UsageError
from stagewright.runtime.launch.ssh import PORT, OverSsh

_Seats = tuple[int | None, ...]
"""For each host of the plan who plays its part; None where nobody does."""


@dataclass
class Members:
    """The hosts that a run may use, and those that it uses now."""

    known: OverSsh
    limits: tuple[int, int]
    """How many it needs at least, and how many its plan has work for."""
    wait_s: float
    check: Callable[[OverSsh, Collection[int], int], None]
    """Refuses hosts that cannot train together, given those of the plan that are missing and the port to meet at."""
    tell: Callable[[str], None]
    seats: _Seats = ()
    has_grown: bool = False
    """Whether hosts have come for whom there is work."""
    _told: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if len(self.known.names) < self.limits[1]:
            told = f"--nodes names {len(self.known.names)} hosts, but --nnodes up to {self.limits[1]}"
            raise UsageError(told, "name them all, spare ones last")

    @property
    def hosts(self) -> OverSsh:
        """Those in use, in the order of the plan's hosts."""
        return self._only(self.seats)

    @property
    def missing(self) -> list[int]:
        """The hosts of the plan whose part nobody plays."""
        return _free(self.seats)

    def gather(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Takes the hosts that are there: as soon as there are enough for the whole plan, else after the wait."""
        until = time.monotonic() + self.wait_s
        while True:
            seats = self._seats_of(self.known.lost())
            is_last = time.monotonic() >= until or is_hurried()
            fault = self._fault_of(seats, PORT) if is_last or not _free(seats) else None
            if fault is None and (is_last or not _free(seats)):
                self.seats, self.has_grown = seats, False
                return
            if fault is not None and is_last:
                raise fault
            away = ", ".join(self.known.names[number] for number in _free(seats)) or str(fault)
            self._tell_once(f"waiting for {away}, up to {self.wait_s:g} s")
            time.sleep(1.0)

    @contextmanager
    def watching(self, found: Callable[[], None]) -> Iterator[None]:
        """Calls `found` once there are hosts for seats that are free, while the block runs."""
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over, found), name="members", daemon=True)
        if self.missing:
            thread.start()
        try:
            yield
        finally:
            over.set()

    def _watch(self, over: threading.Event, found: Callable[[], None]) -> None:
        while not over.wait(2.0):
            seats = self._seats_of(self.known.lost())
            if len(_free(seats)) >= len(self.missing):
                continue
            fault = self._fault_of(seats, 0)  # the run itself holds the port
            if fault is not None:
                self._tell_once(f"a host is there that cannot take part: {fault.what}")
            elif not over.is_set():
                self.has_grown = True
                found()
                return

    def _seats_of(self, lost: Collection[int]) -> _Seats:
        """Who sits where: each host of the plan plays its own part, and spare ones those of the lost."""
        names = [number for number in range(len(self.known.names)) if number not in lost]
        spare = [number for number in names if number >= self.limits[1]]
        return tuple(seat if seat in names else spare.pop(0) if spare else None for seat in range(self.limits[1]))

    def _fault_of(self, seats: _Seats, port: int) -> StagewrightError | None:
        """Why these hosts cannot train together, if they cannot."""
        there = len(seats) - len(_free(seats))
        if there < self.limits[0]:
            away = ", ".join(self.known.names[number] for number in _free(seats))
            told = f"{there} hosts answer, and --nnodes asks for {self.limits[0]} at least: {away} do not"
            return RunError(told, "start them, and go on with --resume auto; or wait longer with --wait-for-hosts")
        try:
            self.check(self._only(seats), _free(seats), port)
        except StagewrightError as fault:
            return fault
        return None

    def _only(self, seats: _Seats) -> OverSsh:
        return replace(self.known, names=tuple(self.known.names[number] for number in seats if number is not None))

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.tell(text)


def _free(seats: _Seats) -> list[int]:
    return [seat for seat, host in enumerate(seats) if host is None]
