"""Who waited for whom, and who is to blame: read from the flight recorders, without torch.

0  B0.2 of batch 12   waits for 3, which has not begun SB1.2>0
1  B0.2 of batch 12   waits for 3
3  F1.2 of batch 12   waits for nobody: it is the culprit
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stagewright.plan import Plan
from stagewright.runtime.run_folder import STATUSES
from stagewright.runtime.safety.flight import Confession, read_confessions, read_flight
from stagewright.schedule import RECEIVES, Action, Kind, Schedule


class _Stand(NamedTuple):
    """Where a worker was at last."""

    time_s: float
    action: Action
    seen: frozenset[Action]
    """Its last actions."""


class _Wait(NamedTuple):
    """A worker that cannot go on before another has done something."""

    worker: int
    peer: int
    needs: Action


def where_all_stand(folder: Path, num_workers: int) -> dict[int, _Stand]:
    """The last action of each worker that has left a recorder; receipts are drawn ahead and say little."""
    found = {}
    for worker in range(num_workers):
        trace = read_flight(folder, worker)
        entries = trace.entries if trace is not None else []
        telling = [entry for entry in entries if entry[1].kind not in RECEIVES] or entries
        if telling:
            found[worker] = _Stand(*telling[-1], frozenset(action for _, action in entries))
    return found


def _needs_of(schedule: Schedule, worker: int, action: Action) -> list[_Wait]:
    """What others must have done before an action can end."""
    kind, stage, batch, microbatch, _ = action
    plan = schedule.plan
    if kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT):
        receive, send, source = Kind.RECEIVE_BACKWARD, Kind.SEND_BACKWARD, stage + 1
        if kind is Kind.FORWARD:
            receive, send, source = Kind.RECEIVE_FORWARD, Kind.SEND_FORWARD, stage - 1
        key = (receive, source, microbatch)
        peers = [one.peer for one in schedule.orders[worker] if (one.kind, one.stage, one.microbatch) == key]
        needs, others = Action(send, source, batch, microbatch, worker), peers
    elif kind is Kind.AGREE:
        needs, others = action, list(range(len(plan.devices)))
    elif kind is Kind.UPDATE:
        needs = Action(Kind.REDUCE, stage, batch, -1, plan.stages[stage].num_buckets - 1)
        others = list(plan.workers[stage])
    else:
        return []
    return [_Wait(worker, other, needs) for other in others if other != worker]


def _has_begun(schedule: Schedule, worker: int, stand: _Stand | None, needs: Action) -> bool:
    """Whether a worker has come to an action; where it stands is all that is known."""
    if stand is None or needs in stand.seen:
        return stand is not None
    order = [one._replace(batch=0) for one in schedule.orders[worker]]

    def place_of(action: Action) -> int | None:
        """How far into its endless order the worker is with an action."""
        key = action._replace(batch=0)
        if key not in order:
            return None
        index = order.index(key)
        return (action.batch - schedule.orders[worker][index].batch) * len(order) + index

    here, there = place_of(stand.action), place_of(needs)
    return here is not None and there is not None and here >= there


def _waits(schedule: Schedule, stands: Mapping[int, _Stand]) -> list[_Wait]:
    """Everyone who waits for somebody that has not come to it yet."""
    needed = (wait for worker, stand in stands.items() for wait in _needs_of(schedule, worker, stand.action))
    return [wait for wait in needed if not _has_begun(schedule, wait.peer, stands.get(wait.peer), wait.needs)]


def name_of(plan: Plan, worker: int) -> str:
    """A worker with its stages and its device."""
    stages = ", ".join(str(number) for number, members in enumerate(plan.workers) if worker in members)
    return f"worker {worker} (stage {stages}, device {plan.devices[worker]})"


def position(action: Action) -> str:
    """An action with its batch and microbatch: F1.2 of batch 12, microbatch 2."""
    microbatch = f", microbatch {action.microbatch}" if action.microbatch >= 0 else ""
    return f"{action._replace(batch=0)} of batch {action.batch}{microbatch}"


def _describe_wait(schedule: Schedule, stands: Mapping[int, _Stand], found: Iterable[_Wait]) -> list[str]:
    """A line for each worker that waits: for whom, and where that one stands."""
    lines = []
    now = max((stand.time_s for stand in stands.values()), default=0.0)
    for wait in found:
        stand, other = stands[wait.worker], stands.get(wait.peer)
        where = "has left no trace" if other is None else f"stands at {position(other.action)}"
        silent = 0.0 if other is None else now - other.time_s
        ago = f" since {silent:.1f} s before the last sign of anyone" if silent > 1 else ""
        lines.append(
            f"worker {wait.worker} waited at {position(stand.action)} for {name_of(schedule.plan, wait.peer)}, "
            f"which {where}{ago}"
        )
    return lines


def verdict(schedule: Schedule, folder: Path, worker: int, timeout_s: float) -> str:
    """What a worker says that did not get on: its wait, as far as the recorders of the others can be read."""
    stands = where_all_stand(folder, len(schedule.plan.devices))
    own = [wait for wait in _waits(schedule, stands) if wait.worker == worker]
    lines = _describe_wait(schedule, stands, own)
    if lines:
        return f"{lines[0]} (timeout {timeout_s:g} s)"
    where = position(stands[worker].action) if worker in stands else "the start"
    return f"worker {worker} waited at {where} for more than {timeout_s:g} s"


@dataclass(frozen=True)
class Blame:
    """Who is to blame for the end of a run, and why."""

    worker: int | None
    why: str
    evidence: tuple[str, ...] = ()
    is_own: bool = True
    """Whether the fault is the worker's own, and not what it saw of another's."""


def blame(schedule: Schedule, folder: Path, exit_codes: Mapping[int, int] | None = None) -> Blame:
    """The first cause: a worker's own fault, else one that was killed or stopped, else one that others waited for."""
    codes, memory = _read_statuses(folder)
    number = len(schedule.plan.devices)
    stands, told = where_all_stand(folder, number), read_confessions(folder, number)
    scene = _Scene(schedule, folder, stands, told, codes if exit_codes is None else exit_codes, memory)
    failed = {worker: code for worker, code in scene.codes.items() if code > 0}
    return (
        scene.confessed()
        or scene.killed()
        or scene.ended_without_a_word(failed)
        or scene.lost_hosts()
        or scene.fell_silent()
        or scene.kept_waiting()
        or scene.ended_without_a_word(scene.codes)
        or scene.unclear()
    )


def _read_statuses(folder: Path) -> tuple[dict[int, int], str | None]:
    """How workers ended, and what is known of the memory then."""
    try:
        kept = json.loads((folder / STATUSES).read_text(encoding="utf-8"))
        return {int(worker): int(code) for worker, code in kept["statuses"].items()}, kept["memory"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, None


@dataclass(frozen=True)
class _Scene:
    """All that is known of the end of a run, and what each rule makes of it."""

    schedule: Schedule
    folder: Path
    stands: Mapping[int, _Stand]
    told: Mapping[int, Confession]
    codes: Mapping[int, int]
    memory: str | None

    def confessed(self) -> Blame | None:
        """The first worker that ended by a fault of its own."""
        own = sorted((each.time, worker) for worker, each in self.told.items() if each.own)
        if not own:
            return None
        worker = own[0][1]
        status = f" with exit status {self.codes[worker]}" if self.codes.get(worker, 0) > 0 else ""
        lines = (self.told[worker].what, *self.told[worker].todo.splitlines())
        return Blame(worker, f"failed{status}{self.at(worker)}", lines)

    def killed(self) -> Blame | None:
        """A worker that was killed or is stopped; what others abort with, or are ended with, says nothing."""
        for worker, code in sorted(self.codes.items()):
            if code == -signal.SIGSTOP:
                return Blame(worker, f"was stopped (SIGSTOP){self.at(worker)}")
            if code < 0 and -code not in (signal.SIGTERM, signal.SIGABRT):
                said = (self.memory,) if self.memory and -code == signal.SIGKILL else ()
                return Blame(worker, f"stopped with signal {-code}{self.at(worker)}", said)
        return None

    def ended_without_a_word(self, codes: Mapping[int, int]) -> Blame | None:
        """A worker that failed and did not say why."""
        for worker, code in sorted(codes.items()):
            if worker not in self.told and code not in (0, -signal.SIGTERM):
                how = f"failed with exit status {code}" if code > 0 else f"stopped with signal {-code}"
                return Blame(worker, f"{how}{self.at(worker)}")
        return None

    def lost_hosts(self) -> Blame | None:
        """Hosts that others could not reach any more."""
        lost = sorted({name for each in self.told.values() for name in each.lost})
        if not lost:
            return None
        why = f"host {lost[0]} does not answer any more" if len(lost) == 1 else f"hosts {', '.join(lost)} are cut off"
        return Blame(None, why, tuple(each.what for each in self.told.values() if each.lost))

    def fell_silent(self) -> Blame | None:
        """Workers that were not alive any more long before the last of the others: stopped, or cut off."""
        found = {worker: read_flight(self.folder, worker) for worker in range(len(self.schedule.plan.devices))}
        traces = {worker: trace for worker, trace in found.items() if trace is not None}
        said = {worker: each.time for worker, each in self.told.items()}
        last = {worker: max(trace.beat_s, said.get(worker, 0.0)) for worker, trace in traces.items()}
        newest = max(last.values(), default=0.0)
        # One that is heard of less often than every 2 s may just have been slow.
        silent = [worker for worker, when in last.items() if newest - when > max(2.0, traces[worker].silence_s / 2)]
        if len(silent) == 1:
            return Blame(silent[0], f"gave no sign of life any more{self.at(silent[0])}: it was stopped or cut off")
        names = ", ".join(map(str, silent))
        why = f"workers {names} gave no sign of life any more: they were stopped or cut off"
        return Blame(None, why) if silent else None

    def kept_waiting(self) -> Blame | None:
        """Those that others wait for and that wait for nobody; in a ring of waits, all of it."""
        found = _waits(self.schedule, self.stands)
        waiting, waited_for = {wait.worker for wait in found}, {wait.peer for wait in found}
        guilty = sorted(waited_for - waiting) or sorted(waited_for & waiting)
        lines = tuple(_describe_wait(self.schedule, self.stands, found))
        if len(guilty) == 1:
            return Blame(guilty[0], f"kept the others waiting{self.at(guilty[0])}", lines)
        why = f"workers {', '.join(map(str, guilty))} waited for one another"
        return Blame(None, why, lines) if guilty else None

    def unclear(self) -> Blame:
        """What can be said when nobody is to blame: what the first that spoke saw, or nothing."""
        for worker, each in sorted(self.told.items()):
            said = (each.what, "all had sent what was waited for: look at the link between them")
            return Blame(worker, f"failed{self.at(worker)}", said, is_own=False)
        for worker, code in sorted(self.codes.items()):
            return Blame(worker, f"failed with exit status {code}{self.at(worker)}", is_own=False)
        return Blame(None, "nobody waited for anyone, and nobody said why it ended")

    def at(self, worker: int) -> str:
        """Where a worker stood, as the end of a sentence."""
        return f" at {position(self.stands[worker].action)}" if worker in self.stands else ""
