"""Who waited for whom, and who is to blame: read from the flight recorders, without torch.

0  B0.2 of batch 12   waits for 3, which has not begun SB1.2>0
1  B0.2 of batch 12   waits for 3
3  F1.2 of batch 12   waits for nobody: it is the culprit
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagewright.plan import Plan
from stagewright.runtime.flight import read_flight
from stagewright.schedule import RECEIVES, Action, Kind, Schedule

BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
ECHOES = (
    "closed by peer", "reset by peer", "timed out", "timeout", "broken pipe", "connection refused", "gloo", "nccl",
    "waited", "sent rows were not taken", "socket", "process group",
)  # fmt: skip
"""Words in the fault of a worker that only suffered from another one's."""


@dataclass(frozen=True)
class Stand:
    """Where a worker was at last."""

    worker: int
    time_s: float
    action: Action
    seen: frozenset[Action]
    """Its last actions."""


@dataclass(frozen=True)
class Wait:
    """A worker that cannot go on before another has done something."""

    worker: int
    peer: int
    needs: Action


def where_all_stand(folder: Path, num_workers: int) -> dict[int, Stand]:
    """The last action of each worker that has left a recorder; receipts are drawn ahead and say little."""
    found = {}
    for worker in range(num_workers):
        entries = read_flight(folder, worker)
        telling = [entry for entry in entries if entry[1].kind not in RECEIVES] or entries
        if telling:
            found[worker] = Stand(worker, telling[-1][0], telling[-1][1], frozenset(action for _, action in entries))
    return found


def needs_of(schedule: Schedule, worker: int, action: Action) -> list[Wait]:
    """What others must have done before an action can end."""
    kind, stage, batch, microbatch, _ = action
    plan = schedule.plan
    if kind is Kind.FORWARD or kind in BACKWARDS:
        forward = kind is Kind.FORWARD
        receive, send = (
            (Kind.RECEIVE_FORWARD, Kind.SEND_FORWARD) if forward else (Kind.RECEIVE_BACKWARD, Kind.SEND_BACKWARD)
        )
        source = stage + (-1 if forward else 1)
        key = (receive, source, microbatch)
        peers = [one.peer for one in schedule.orders[worker] if (one.kind, one.stage, one.microbatch) == key]
        return [Wait(worker, peer, Action(send, source, batch, microbatch, worker)) for peer in peers]
    if kind is Kind.AGREE:
        others = (other for other in range(len(plan.devices)) if other != worker)
        return [Wait(worker, other, action) for other in others]
    if kind is Kind.UPDATE:
        last = Action(Kind.REDUCE, stage, batch, -1, plan.stages[stage].num_buckets - 1)
        return [Wait(worker, other, last) for other in plan.workers[stage] if other != worker]
    return []


def place_of(schedule: Schedule, worker: int, action: Action) -> int | None:
    """How far into its endless order a worker is with an action."""
    order = schedule.orders[worker]
    for index, one in enumerate(order):
        if one._replace(batch=0) == action._replace(batch=0):
            return (action.batch - one.batch) * len(order) + index
    return None


def has_begun(schedule: Schedule, stand: Stand | None, needs: Action) -> bool:
    """Whether a worker has come to an action; where it stands is all that is known."""
    if stand is None:
        return False
    if needs in stand.seen:
        return True
    here, there = (place_of(schedule, stand.worker, action) for action in (stand.action, needs))
    return here is not None and there is not None and here >= there


def waits(schedule: Schedule, stands: Mapping[int, Stand]) -> list[Wait]:
    """Everyone who waits for somebody that has not come to it yet."""
    needed = (wait for stand in stands.values() for wait in needs_of(schedule, stand.worker, stand.action))
    return [wait for wait in needed if not has_begun(schedule, stands.get(wait.peer), wait.needs)]


def culprits(found: Sequence[Wait]) -> list[int]:
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


def describe_wait(schedule: Schedule, stands: Mapping[int, Stand], found: Iterable[Wait]) -> list[str]:
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


def read_confession(folder: Path, worker: int) -> dict[str, str] | None:
    """What a worker wrote down about its end."""
    try:
        told = json.loads((folder / f"worker-{worker}.error.json").read_text(encoding="utf-8"))
        return {"what": str(told["what"]), "todo": str(told.get("todo") or "")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_echo(what: str) -> bool:
    """Whether a fault is only another worker's, heard over the wire."""
    return any(word in what.lower() for word in ECHOES)


@dataclass(frozen=True)
class Blame:
    """Who is to blame for the end of a run, and why."""

    worker: int | None
    why: str
    evidence: tuple[str, ...] = ()


def blame(schedule: Schedule, folder: Path, exit_codes: Mapping[int, int] | None = None) -> Blame:
    """The first cause: a worker that was killed, else one with a fault of its own, else one that others waited for."""
    plan, codes = schedule.plan, exit_codes or {}
    stands = where_all_stand(folder, len(plan.devices))
    for worker, code in sorted(codes.items()):
        if code < 0 and code != -15:
            return Blame(worker, f"stopped with signal {-code}{at(stands, worker)}")
    for worker in range(len(plan.devices)):
        told = read_confession(folder, worker)
        if told is not None and not is_echo(told["what"]):
            status = f" with exit status {codes[worker]}" if worker in codes else ""
            return Blame(worker, f"failed{status}{at(stands, worker)}", (told["what"], *told["todo"].splitlines()))
    found = waits(schedule, stands)
    guilty, lines = culprits(found), tuple(describe_wait(schedule, stands, found))
    if len(guilty) == 1:
        return Blame(guilty[0], f"kept the others waiting{at(stands, guilty[0])}", lines)
    if guilty:
        return Blame(None, f"workers {', '.join(map(str, guilty))} waited for one another", lines)
    return unclear(stands, folder, len(plan.devices), codes)


def unclear(stands: Mapping[int, Stand], folder: Path, num_workers: int, codes: Mapping[int, int]) -> Blame:
    """What can be said when nobody waited for anyone: the first that confessed, or nothing."""
    for worker in range(num_workers):
        told = read_confession(folder, worker)
        if told is not None:
            said = (told["what"], "all had sent what was waited for: look at the link between them")
            return Blame(worker, f"failed{at(stands, worker)}", said)
    for worker, code in sorted(codes.items()):
        return Blame(worker, f"failed with exit status {code}{at(stands, worker)}")
    return Blame(None, "nobody waited for anyone, and nobody said why it ended")


def at(stands: Mapping[int, Stand], worker: int) -> str:
    """Where a worker stood, as the end of a sentence."""
    return f" at {position(stands[worker].action)}" if worker in stands else ""
