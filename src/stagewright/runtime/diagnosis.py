"""Who waited for whom, and who is to blame: read from the flight recorders, without torch.

0  B0.2 of batch 12   waits for 3, which has not begun SB1.2>0
1  B0.2 of batch 12   waits for 3
3  F1.2 of batch 12   waits for nobody: it is the culprit
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagewright.plan import Plan
from stagewright.runtime.confession import Confession, read_confessions
from stagewright.runtime.flight import STATUSES, read_beat, read_flight, write_json
from stagewright.schedule import RECEIVES, Action, Kind, Schedule

_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_LEAST_SILENCE_S = 2.0
"""A worker that is heard of less often than this may just have been slow."""


@dataclass(frozen=True)
class _Stand:
    """Where a worker was at last."""

    worker: int
    time_s: float
    action: Action
    seen: frozenset[Action]
    """Its last actions."""


@dataclass(frozen=True)
class _Wait:
    """A worker that cannot go on before another has done something."""

    worker: int
    peer: int
    needs: Action


def where_all_stand(folder: Path, num_workers: int) -> dict[int, _Stand]:
    """The last action of each worker that has left a recorder; receipts are drawn ahead and say little."""
    found = {}
    for worker in range(num_workers):
        entries = read_flight(folder, worker)
        telling = [entry for entry in entries if entry[1].kind not in RECEIVES] or entries
        if telling:
            found[worker] = _Stand(worker, telling[-1][0], telling[-1][1], frozenset(action for _, action in entries))
    return found


def _needs_of(schedule: Schedule, worker: int, action: Action) -> list[_Wait]:
    """What others must have done before an action can end."""
    kind, stage, batch, microbatch, _ = action
    plan = schedule.plan
    if kind is Kind.FORWARD or kind in _BACKWARDS:
        forward = kind is Kind.FORWARD
        receive, send = (
            (Kind.RECEIVE_FORWARD, Kind.SEND_FORWARD) if forward else (Kind.RECEIVE_BACKWARD, Kind.SEND_BACKWARD)
        )
        source = stage + (-1 if forward else 1)
        key = (receive, source, microbatch)
        peers = [one.peer for one in schedule.orders[worker] if (one.kind, one.stage, one.microbatch) == key]
        return [_Wait(worker, peer, Action(send, source, batch, microbatch, worker)) for peer in peers]
    if kind is Kind.AGREE:
        others = (other for other in range(len(plan.devices)) if other != worker)
        return [_Wait(worker, other, action) for other in others]
    if kind is Kind.UPDATE:
        last = Action(Kind.REDUCE, stage, batch, -1, plan.stages[stage].num_buckets - 1)
        return [_Wait(worker, other, last) for other in plan.workers[stage] if other != worker]
    return []


def _place_of(schedule: Schedule, worker: int, action: Action) -> int | None:
    """How far into its endless order a worker is with an action."""
    order = schedule.orders[worker]
    for index, one in enumerate(order):
        if one._replace(batch=0) == action._replace(batch=0):
            return (action.batch - one.batch) * len(order) + index
    return None


def _has_begun(schedule: Schedule, stand: _Stand | None, needs: Action) -> bool:
    """Whether a worker has come to an action; where it stands is all that is known."""
    if stand is None:
        return False
    if needs in stand.seen:
        return True
    here, there = (_place_of(schedule, stand.worker, action) for action in (stand.action, needs))
    return here is not None and there is not None and here >= there


def _waits(schedule: Schedule, stands: Mapping[int, _Stand]) -> list[_Wait]:
    """Everyone who waits for somebody that has not come to it yet."""
    needed = (wait for stand in stands.values() for wait in _needs_of(schedule, stand.worker, stand.action))
    return [wait for wait in needed if not _has_begun(schedule, stands.get(wait.peer), wait.needs)]


def _culprits(found: Sequence[_Wait]) -> list[int]:
    """Those that others wait for and that wait for nobody; in a ring of waits, all of it."""
    waiting = {wait.worker for wait in found}
    waited_for = {wait.peer for wait in found}
    return sorted(waited_for - waiting) or sorted(waited_for & waiting)


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


def silent(folder: Path, num_workers: int, told: Mapping[int, Confession]) -> list[int]:
    """The workers that were not alive any more long before the last of the others: stopped, or cut off."""
    beats = {worker: beat for worker in range(num_workers) if (beat := read_beat(folder, worker)) is not None}
    last = {worker: max(when, told[worker].time_s if worker in told else 0.0) for worker, (when, _) in beats.items()}
    newest = max(last.values(), default=0.0)
    return [worker for worker, when in last.items() if newest - when > max(_LEAST_SILENCE_S, beats[worker][1] / 2)]


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
    kept, memory = _read_statuses(folder)
    codes, number = kept if exit_codes is None else exit_codes, len(schedule.plan.devices)
    stands, told = where_all_stand(folder, number), read_confessions(folder, number)
    return (
        _by_confession(stands, told, codes)
        or _by_signal(stands, codes, memory)
        or _without_a_word(stands, told, {worker: code for worker, code in codes.items() if code > 0})
        or _by_loss(told)
        or _by_silence(stands, silent(folder, number, told))
        or _by_waiting(schedule, stands)
        or _without_a_word(stands, told, codes)
        or _unclear(stands, told, codes)
    )


def _by_confession(
    stands: Mapping[int, _Stand], told: Mapping[int, Confession], codes: Mapping[int, int]
) -> Blame | None:
    """The first worker that ended by a fault of its own."""
    own = sorted((each.time_s, worker) for worker, each in told.items() if each.is_own)
    if not own:
        return None
    worker = own[0][1]
    status = f" with exit status {codes[worker]}" if codes.get(worker, 0) > 0 else ""
    lines = (told[worker].what, *told[worker].todo.splitlines())
    return Blame(worker, f"failed{status}{_at(stands, worker)}", lines)


def keep_statuses(folder: Path, codes: Mapping[int, int], memory: str | None) -> None:
    """Writes down how workers ended, for those who ask later."""
    write_json(folder / STATUSES, {"statuses": {str(worker): code for worker, code in codes.items()}, "memory": memory})


def _read_statuses(folder: Path) -> tuple[dict[int, int], str | None]:
    """How workers ended, and what is known of the memory then."""
    try:
        kept = json.loads((folder / STATUSES).read_text(encoding="utf-8"))
        return {int(worker): int(code) for worker, code in kept["statuses"].items()}, kept["memory"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, None


def _by_signal(stands: Mapping[int, _Stand], codes: Mapping[int, int], memory: str | None) -> Blame | None:
    """A worker that was killed or is stopped; what others abort with, or are ended with, says nothing."""
    for worker, code in sorted(codes.items()):
        if code == -signal.SIGSTOP:
            return Blame(worker, f"was stopped (SIGSTOP){_at(stands, worker)}")
        if code < 0 and -code not in (signal.SIGTERM, signal.SIGABRT):
            said = (memory,) if memory and -code == signal.SIGKILL else ()
            return Blame(worker, f"stopped with signal {-code}{_at(stands, worker)}", said)
    return None


def _by_loss(told: Mapping[int, Confession]) -> Blame | None:
    """Hosts that others could not reach any more."""
    lost = sorted({name for each in told.values() for name in each.lost})
    if not lost:
        return None
    why = f"host {lost[0]} does not answer any more" if len(lost) == 1 else f"hosts {', '.join(lost)} are cut off"
    return Blame(None, why, tuple(each.what for each in told.values() if each.lost))


def _by_silence(stands: Mapping[int, _Stand], found: Sequence[int]) -> Blame | None:
    """A worker that gave no sign of life while the others did."""
    if len(found) == 1:
        return Blame(found[0], f"gave no sign of life any more{_at(stands, found[0])}: it was stopped or cut off")
    names = ", ".join(map(str, found))
    return (
        Blame(None, f"workers {names} gave no sign of life any more: they were stopped or cut off") if found else None
    )


def _by_waiting(schedule: Schedule, stands: Mapping[int, _Stand]) -> Blame | None:
    """The worker at the end of all waits."""
    found = _waits(schedule, stands)
    guilty, lines = _culprits(found), tuple(_describe_wait(schedule, stands, found))
    if len(guilty) == 1:
        return Blame(guilty[0], f"kept the others waiting{_at(stands, guilty[0])}", lines)
    return Blame(None, f"workers {', '.join(map(str, guilty))} waited for one another", lines) if guilty else None


def _without_a_word(
    stands: Mapping[int, _Stand], told: Mapping[int, Confession], codes: Mapping[int, int]
) -> Blame | None:
    """A worker that failed and did not say why."""
    for worker, code in sorted(codes.items()):
        if worker not in told and code not in (0, -signal.SIGTERM):
            how = f"failed with exit status {code}" if code > 0 else f"stopped with signal {-code}"
            return Blame(worker, f"{how}{_at(stands, worker)}")
    return None


def _unclear(stands: Mapping[int, _Stand], told: Mapping[int, Confession], codes: Mapping[int, int]) -> Blame:
    """What can be said when nobody is to blame: what the first that spoke saw, or nothing."""
    for worker, each in sorted(told.items()):
        said = (each.what, "all had sent what was waited for: look at the link between them")
        return Blame(worker, f"failed{_at(stands, worker)}", said, is_own=False)
    for worker, code in sorted(codes.items()):
        return Blame(worker, f"failed with exit status {code}{_at(stands, worker)}", is_own=False)
    return Blame(None, "nobody waited for anyone, and nobody said why it ended")


def _at(stands: Mapping[int, _Stand], worker: int) -> str:
    """Where a worker stood, as the end of a sentence."""
    return f" at {position(stands[worker].action)}" if worker in stands else ""
