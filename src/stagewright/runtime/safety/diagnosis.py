"""Who waited for whom, and who is to blame: read from the flight recorders, without torch.

0  B0.2 of batch 12   waits for 3, which has not begun SB1.2>0
1  B0.2 of batch 12   waits for 3
3  F1.2 of batch 12   waits for nobody: it is the culprit
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stagewright.runtime.run_folder import STATUSES
from stagewright.runtime.safety.flight import Confession, Trace
from stagewright.schedule import RECEIVES, Action, Kind, Schedule


class _Wait(NamedTuple):
    """A worker that cannot go on before another has done something."""

    worker: int
    peer: int
    needs: Action


@dataclass(frozen=True)
class Blame:
    """Who is to blame for the end of a run, and why."""

    worker: int | None
    why: str
    evidence: tuple[str, ...] = ()
    is_own: bool = True
    """Whether the fault is the worker's own, and not what it saw of another's."""


@dataclass(frozen=True)
class Scene:
    """All that is known of where the workers of a run stand, or stood at its end."""

    schedule: Schedule
    traces: Mapping[int, Trace]
    stands: Mapping[int, tuple[float, Action]]
    """When each worker that has left a trace did its last action, and which."""
    told: Mapping[int, Confession]
    codes: Mapping[int, int]
    """The exit status of those that failed."""
    memory: str | None
    """A word on memory that was full then."""

    @classmethod
    def read(cls, schedule: Schedule, folder: Path, codes: Mapping[int, int] | None = None) -> Scene:
        """What a run's folder has of it; how workers ended too, where that is not given."""
        everyone, kept, memory = range(len(schedule.plan.devices)), dict[int, int](), None
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            found = json.loads((folder / STATUSES).read_text(encoding="utf-8"))
            kept, memory = {int(worker): int(code) for worker, code in found["statuses"].items()}, found["memory"]
        traces = {worker: trace for worker in everyone if (trace := Trace.read(folder, worker)) is not None}
        stands = {}
        for worker, trace in traces.items():
            # Receipts are drawn ahead and say little.
            telling = [entry for entry in trace.entries if entry[1].kind not in RECEIVES] or trace.entries
            if telling:
                stands[worker] = telling[-1]
        told = {worker: said for worker in everyone if (said := Confession.read(folder, worker)) is not None}
        return cls(schedule, traces, stands, told, kept if codes is None else codes, memory)

    def name_of(self, worker: int) -> str:
        """A worker with its stages and its device."""
        plan = self.schedule.plan
        stages = ", ".join(str(number) for number, members in enumerate(plan.workers) if worker in members)
        return f"worker {worker} (stage {stages}, device {plan.devices[worker]})"

    def place_of(self, worker: int) -> str | None:
        """Where a worker stands, with batch and microbatch: F1.2 of batch 12, microbatch 2."""
        if worker not in self.stands:
            return None
        action = self.stands[worker][1]
        microbatch = f", microbatch {action.microbatch}" if action.microbatch >= 0 else ""
        return f"{action._replace(batch=0)} of batch {action.batch}{microbatch}"

    def verdict(self, worker: int, timeout_s: float) -> str:
        """What a worker says that did not get on: its wait, as far as the recorders of the others can be read."""
        lines = self._described([wait for wait in self._waits() if wait.worker == worker])
        if lines:
            return f"{lines[0]} (timeout {timeout_s:g} s)"
        waited = f"worker {worker} waited at {self.place_of(worker) or 'the start'}"
        if len(silent := self._silent()) == 1 and silent != [worker]:  # all have begun what it died or hangs in
            return f"{waited} for {self.name_of(silent[0])}, which gave no sign of life any more{self._at(silent[0])}"
        return f"{waited} for more than {timeout_s:g} s"

    def blame(self) -> Blame:
        """The first cause: a fault of a worker, else one that was killed or stopped, else one that others wait for."""
        failed = {worker: code for worker, code in self.codes.items() if code > 0}
        return (
            self._confessed()
            or self._killed()
            or self._ended_without_a_word(failed)
            or self._lost_hosts()
            or self._fell_silent()
            or self._kept_waiting()
            or self._ended_without_a_word(self.codes)
            or self._unclear()
        )

    # Who waits

    def waits(self) -> dict[int, list[int]]:
        """For each worker that cannot go on those that it waits for."""
        found: dict[int, list[int]] = {}
        for wait in self._waits():
            found.setdefault(wait.worker, []).append(wait.peer)
        return found

    def _waits(self) -> list[_Wait]:
        """Everyone who waits for somebody that has not come to it yet."""
        needed = (wait for worker, (_, action) in self.stands.items() for wait in self._needs_of(worker, action))
        return [wait for wait in needed if not self._has_begun(wait.peer, wait.needs)]

    def _needs_of(self, worker: int, action: Action) -> list[_Wait]:
        """What others must have done before an action can end."""
        kind, stage, batch, microbatch, _ = action
        plan = self.schedule.plan
        if kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT):
            receive, send, source = Kind.RECEIVE_BACKWARD, Kind.SEND_BACKWARD, stage + 1
            if kind is Kind.FORWARD:
                receive, send, source = Kind.RECEIVE_FORWARD, Kind.SEND_FORWARD, stage - 1
            key, order = (receive, source, microbatch), self.schedule.orders[worker]
            others = [one.peer for one in order if (one.kind, one.stage, one.microbatch) == key]
            needs = Action(send, source, batch, microbatch, worker)
        elif kind is Kind.AGREE:
            needs, others = action, list(range(len(plan.devices)))
        elif kind is Kind.UPDATE:
            needs = Action(Kind.REDUCE, stage, batch)
            others = list(plan.workers[stage])
        else:
            return []
        return [_Wait(worker, other, needs) for other in others if other != worker]

    def _has_begun(self, worker: int, needs: Action) -> bool:
        """Whether a worker has come to an action; where it stands is all that is known."""
        if worker not in self.stands:
            return False
        if any(action == needs for _, action in self.traces[worker].entries):
            return True
        order = self.schedule.orders[worker]
        keys = [one._replace(batch=0) for one in order]

        def index_of(action: Action) -> int | None:
            """How far into its endless order the worker is with an action."""
            key = action._replace(batch=0)
            if key not in keys:
                return None
            return (action.batch - order[keys.index(key)].batch) * len(order) + keys.index(key)

        here, there = index_of(self.stands[worker][1]), index_of(needs)
        return here is not None and there is not None and here >= there

    def _described(self, waits: list[_Wait]) -> list[str]:
        """A line for each worker that waits: for whom, and where that one stands."""
        lines = []
        now = max((time_s for time_s, _ in self.stands.values()), default=0.0)
        for worker, peer, _ in waits:
            silent = now - self.stands[peer][0] if peer in self.stands else 0.0
            where = f"stands at {self.place_of(peer)}" if peer in self.stands else "has left no trace"
            ago = f" since {silent:.1f} s before the last sign of anyone" if silent > 1 else ""
            waited = f"worker {worker} waited at {self.place_of(worker)}"
            lines.append(f"{waited} for {self.name_of(peer)}, which {where}{ago}")
        return lines

    # Who is to blame

    def _confessed(self) -> Blame | None:
        """The first worker that ended by a fault of its own."""
        own = sorted((each.time, worker) for worker, each in self.told.items() if each.own)
        if not own:
            return None
        worker = own[0][1]
        status = f" with exit status {self.codes[worker]}" if self.codes.get(worker, 0) > 0 else ""
        lines = (self.told[worker].what, *self.told[worker].todo.splitlines())
        return Blame(worker, f"failed{status}{self._at(worker)}", lines)

    def _killed(self) -> Blame | None:
        """A worker that was killed or is stopped; what others abort with, or are ended with, says nothing."""
        for worker, code in sorted(self.codes.items()):
            if code == -signal.SIGSTOP:
                return Blame(worker, f"was stopped (SIGSTOP){self._at(worker)}")
            if code < 0 and -code not in (signal.SIGTERM, signal.SIGABRT):
                said = (self.memory,) if self.memory and -code == signal.SIGKILL else ()
                return Blame(worker, f"stopped with signal {-code}{self._at(worker)}", said)
        return None

    def _ended_without_a_word(self, codes: Mapping[int, int]) -> Blame | None:
        """A worker that failed and did not say why."""
        for worker, code in sorted(codes.items()):
            if worker not in self.told and code not in (0, -signal.SIGTERM):
                how = f"failed with exit status {code}" if code > 0 else f"stopped with signal {-code}"
                return Blame(worker, f"{how}{self._at(worker)}")
        return None

    def _lost_hosts(self) -> Blame | None:
        """Hosts that others could not reach any more, or that did not confirm what they were sent."""
        if lost := _named_most(each.lost for each in self.told.values()):
            why = (
                f"host {lost[0]} does not answer any more" if len(lost) == 1 else f"hosts {', '.join(lost)} are cut off"
            )
            return Blame(None, why, tuple(each.what for each in self.told.values() if each.lost))
        if bad := _named_most(each.links for each in self.told.values()):
            seen = sorted(worker for worker, each in self.told.items() if bad[0] in each.links)
            witness = self.name_of(seen[0]) if len(bad) == len(seen) == 1 else "others"
            why = f"the link between host {', '.join(bad)} and {witness} does not take what is sent"
            return Blame(None, why, tuple(self.told[worker].what for worker in seen))
        return None

    def _silent(self) -> list[int]:
        """Workers that were not alive any more long before the last of the others."""
        said = {worker: each.time for worker, each in self.told.items()}
        last = {worker: max(trace.beat_s, said.get(worker, 0.0)) for worker, trace in self.traces.items()}
        newest = max(last.values(), default=0.0)
        # One that is heard of less often than every 2 s may just have been slow.
        return [worker for worker, when in last.items() if newest - when > max(2.0, self.traces[worker].silence_s / 2)]

    def _fell_silent(self) -> Blame | None:
        """Workers that were stopped or cut off."""
        silent = self._silent()
        if len(silent) == 1:
            return Blame(silent[0], f"gave no sign of life any more{self._at(silent[0])}: it was stopped or cut off")
        names = ", ".join(map(str, silent))
        why = f"workers {names} gave no sign of life any more: they were stopped or cut off"
        return Blame(None, why) if silent else None

    def _kept_waiting(self) -> Blame | None:
        """Those that others wait for and that wait for nobody; in a ring of waits, all of it."""
        found = self._waits()
        waiting, waited_for = {wait.worker for wait in found}, {wait.peer for wait in found}
        guilty = sorted(waited_for - waiting) or sorted(waited_for & waiting)
        lines = tuple(self._described(found))
        if len(guilty) == 1:
            return Blame(guilty[0], f"kept the others waiting{self._at(guilty[0])}", lines)
        why = f"workers {', '.join(map(str, guilty))} waited for one another"
        return Blame(None, why, lines) if guilty else None

    def _unclear(self) -> Blame:
        """What can be said when nobody is to blame: what the first that spoke saw, or nothing."""
        for worker, each in sorted(self.told.items()):
            said = (each.what, "all had sent what was waited for: look at the link between them")
            return Blame(worker, f"failed{self._at(worker)}", said, is_own=False)
        for worker, code in sorted(self.codes.items()):
            return Blame(worker, f"failed with exit status {code}{self._at(worker)}", is_own=False)
        return Blame(None, "nobody waited for anyone, and nobody said why it ended")

    def _at(self, worker: int) -> str:
        """Where a worker stood, as the end of a sentence."""
        return f" at {self.place_of(worker)}" if worker in self.stands else ""


def _named_most(witnesses: Iterable[Sequence[str]]) -> list[str]:
    """Whom most witnesses name: one that is cut off itself names all the others."""
    votes = Counter(name for names in witnesses for name in names)
    return sorted(name for name, number in votes.items() if number == max(votes.values()))
