"""Is a schedule right? Nothing of how it was made is used here: only the plan, the actions and their meaning.

An order repeats, turn after turn; action number i of L, with batch offset o, stands for batch b at the place

    place(b) = i + (b − o) · L        so that "before" and "after" are comparisons of numbers, for all batches at once

Two workers issue what passes between them in the same sequence; then a transfer that must meet its counterpart
completes as soon as one that is buffered, and a single run shows that both kinds come to an end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import NoReturn

from stagewright.errors import ScheduleError
from stagewright.plan import Plan
from stagewright.schedule import SENDS, TRANSFERS, Action, Kind, Schedule, format_order
from stagewright.scheduling.ideal import run_ideally

_Key = tuple[Kind, int, int, int]
"""An action without its batch: kind, stage, microbatch, peer."""

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def check_schedule(schedule: Schedule, num_batches: int | None = None) -> None:
    """Raises a ScheduleError with the reason, the action and the grid unless the schedule is right."""
    if num_batches is not None:
        check_batches(schedule.plan, num_batches)
    for worker in range(len(schedule.orders)):
        _check_places(schedule, worker)
        _check_held(schedule, worker)
    _check_sequences(schedule)
    # The run ends: with buffered sends and, since sequences are equal, with sends that meet their receipts.
    stuck = run_ideally(schedule, schedule.num_batches_drawn if num_batches is None else num_batches).stuck
    for worker, action in stuck.items():
        others = (f"{one} at {other._replace(batch=0)} of batch {other.batch}" for one, other in [*stuck.items()][:8])
        _fail(schedule, worker, action, f"it waits for ever; workers wait: {', '.join(others)}")


def check_batches(plan: Plan, num_batches: int) -> None:
    """Refuses a run that is too short for the versions the plan keeps."""
    if num_batches < max(plan.versions):
        raise ScheduleError(
            f"{max(plan.versions)} weight versions in a run of {num_batches} batches: some would never be used",
            f"run at least {max(plan.versions)} batches, or keep at most {max(num_batches, 1)} versions",
        )


def _check_places(schedule: Schedule, worker: int) -> None:
    """Every action that a worker owes stands in its order once, and no other; each after what it needs."""
    order, places = schedule.orders[worker], dict[_Key, int]()
    for number, action in enumerate(order):
        if _key(action) in places:
            _fail(schedule, worker, action, "it stands in the order twice")
        places[_key(action)] = number - action.batch * len(order)
    rules = [rule for stage in schedule.plan.stages_of[worker] for rule in _rules(schedule, worker, stage, places)]
    wanted = {key for first, second, _ in rules for key in (first, second)}
    for key in sorted(wanted - places.keys()):
        _fail(schedule, worker, _action(key), "it is missing")
    for key in sorted(places.keys() - wanted):
        _fail(schedule, worker, _action(key), "nothing in the plan asks for it")
    for first, second, batches in rules:
        if places[first] >= places[second] + batches * len(order):
            whose = f" of batch n{-batches:+d}" if batches else ""
            reason = f"of batch n it must come after {_action(first)}{whose}, but stands before it"
            _fail(schedule, worker, _action(second), reason)


_Rule = tuple[_Key, _Key, int]
"""An action that must stand before another one, and how many batches later that one is."""


def _rules(schedule: Schedule, worker: int, stage: int, places: Container[_Key]) -> Iterator[_Rule]:
    """Who must stand before whom in a worker's order, for one of its stages; all that it owes stands in a rule."""
    plan, lasts = schedule.plan, list[_Key]()
    replica = plan.workers[stage].index(worker)
    update: _Key = (Kind.UPDATE, stage, -1, -1)
    for number in range(plan.num_microbatches):
        if replica not in plan.peers(stage, number):
            continue
        # Forward, then backward; each after the rows that it needs, and before they are sent on.
        forward: _Key = (_FORWARD, stage, number, -1)
        backward, last = _backward(stage, number, places)
        lasts.append(last)
        yield forward, backward, 0
        if last != backward:
            yield backward, last, 0
        sources, targets = plan.peers(stage, number)[replica]
        for peer in (plan.workers[stage - 1][one] for one in sources):
            if peer == worker:
                yield (_FORWARD, stage - 1, number, -1), forward, 0
            else:
                yield (Kind.RECEIVE_FORWARD, stage - 1, number, peer), forward, 0
                yield backward, (Kind.SEND_BACKWARD, stage, number, peer), 0
        for peer in (plan.workers[stage + 1][one] for one in targets):
            if peer == worker:
                yield _backward(stage + 1, number, places)[0], backward, 0
            else:
                yield forward, (Kind.SEND_FORWARD, stage, number, peer), 0
                yield (Kind.RECEIVE_BACKWARD, stage + 1, number, peer), backward, 0
        yield update, forward, plan.versions[stage]
    # The reduction after backward, then the agreement and the update.
    steps: list[list[_Key]] = [
        lasts, [(Kind.REDUCE, stage, -1, -1)] if plan.replicas[stage] > 1 else [],
        [(Kind.AGREE, -1, -1, -1)] if schedule.agree else [], [update],
    ]  # fmt: skip
    yield from ((first, second, 0) for one, other in combinations(steps, 2) for first, second in product(one, other))


def _backward(stage: int, number: int, places: Container[_Key]) -> tuple[_Key, _Key]:
    """The backward that others wait for, and the one that completes gradients; halves if the order has them."""
    halves: tuple[_Key, _Key] = (_INPUT, stage, number, -1), (_WEIGHT, stage, number, -1)
    whole: _Key = (_BACKWARD, stage, number, -1)
    return halves if halves[0] in places else (whole, whole)


def _check_held(schedule: Schedule, worker: int) -> None:
    """No replica holds the activations of more microbatches than the plan's bound, in the steady state."""
    hold, order = schedule.plan.hold, schedule.orders[worker]
    if hold is None:
        return
    held, change = Counter[int](), {_FORWARD: 1, _BACKWARD: -1, _WEIGHT: -1}
    for kind, stage, batch, _, _ in order:
        # A forward that is d batches ahead of its backward leaves d activations behind at the end of every turn.
        held[stage] += change.get(kind, 0) * batch
    for action in order:
        held[action.stage] += change.get(action.kind, 0)
        if action.kind is _FORWARD and held[action.stage] > hold:
            reason = f"it is one activation more than the {hold} that stage {action.stage} may hold"
            _fail(schedule, worker, action, reason)


_Shared = tuple[tuple[object, ...], int]
"""Something that two workers do together: what it is, and its batch."""


def _check_sequences(schedule: Schedule) -> None:
    """Two workers issue what passes between them, and what they reduce or agree on together, in the same sequence."""
    stages_of = list(map(set, schedule.plan.stages_of))
    lists: dict[tuple[int, int], list[Action]] = {}
    for worker, order in enumerate(schedule.orders):
        for action in order:
            if action.kind in TRANSFERS:
                lists.setdefault((worker, action.peer), []).append(action)
    for worker, peer in sorted(pair for pair in lists if pair[0] < pair[1]):
        mine, theirs = lists[worker, peer], lists.get((peer, worker), [])
        _compare(schedule, worker, peer, mine, theirs, "transfer of theirs")
    pairs = {pair for workers in schedule.plan.workers for pair in zip(workers, workers[1:])}
    # One common stage makes a chain of equal lists; with several, any two workers could disagree.
    several = [worker for worker, stages in enumerate(stages_of) if len(stages) > 1]
    pairs |= {pair for pair in combinations(several, 2) if len(stages_of[pair[0]] & stages_of[pair[1]]) > 1}
    for worker, peer in sorted(pairs):
        common = stages_of[worker] & stages_of[peer] | {-1}
        mine, theirs = (
            [one for one in schedule.orders[who] if one.kind in (Kind.REDUCE, Kind.AGREE) and one.stage in common]
            for who in (worker, peer)
        )
        _compare(schedule, worker, peer, mine, theirs, "reduction or agreement")


def _compare(schedule: Schedule, worker: int, peer: int, mine: list[Action], theirs: list[Action], what: str) -> None:
    fault = _first_difference([_shared(one, worker) for one in mine], [_shared(one, peer) for one in theirs])
    if fault is not None:
        _fail(schedule, worker, mine[fault], f"worker {peer} issues another {what} at this point")


def _shared(action: Action, worker: int) -> _Shared:
    """What both ends of a transfer call it; a reduction or an agreement as it is."""
    kind, stage, batch, number, peer = action
    if kind not in TRANSFERS:
        return (kind, stage, peer), batch
    is_forward = kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
    return (is_forward, stage, number, worker if kind in SENDS else peer), batch


def _first_difference(mine: list[_Shared], theirs: list[_Shared]) -> int | None:
    """Where two endless, repeating sequences differ first, None if nowhere; each may begin its turn at another point.

    A+1 B  and  B A        are both … A1 B0 A2 B1 A3 B2 …
    """
    if mine == theirs:
        return None
    names = [name for name, _ in theirs]
    if not mine or len(mine) != len(theirs) or mine[0][0] not in names:
        return 0
    # Without offsets turns begin together.
    begin = names.index(mine[0][0]) if any(batch for _, batch in mine + theirs) else 0
    turns = mine[0][1] - theirs[begin][1]
    for number, (name, batch) in enumerate(mine):
        turn, at = divmod(begin + number, len(theirs))
        if theirs[at] != (name, batch - turn - turns):
            return number
    return None


def _fail(schedule: Schedule, worker: int, action: Action, reason: str) -> NoReturn:
    """Raises the error that shows a fault: the reason, the action among its neighbours, and the grid."""
    around = _neighbours(schedule.orders[worker], action)
    raise ScheduleError(
        f"worker {worker}, {action._replace(batch=0)}: {reason}",
        "\n".join([f"{worker} │ {around}", "", *_small_grid(schedule, worker)]),
    )


def _neighbours(order: Sequence[Action], action: Action, reach: int = 5) -> str:
    keys = [_key(one) for one in order]
    at = keys.index(_key(action)) if _key(action) in keys else None
    if at is None:
        return format_order(order[: 2 * reach]) + (" …" if len(order) > 2 * reach else "")
    words = [f"▸{one}◂" if number == at else str(one) for number, one in enumerate(order)]
    low, high = max(0, at - reach), at + reach + 1
    return ("… " if low else "") + " ".join(words[low:high]) + (" …" if high < len(order) else "")


def _small_grid(schedule: Schedule, worker: int, rows: int = 16, columns: int = 110) -> Iterable[str]:
    """The grid, cut to a size that fits a screen, around the row of a worker."""
    few = min(schedule.num_batches_drawn, 4)
    lines = schedule.grid(few).splitlines()
    first = max(0, min(worker - rows // 2, len(lines) - rows))
    return [line if len(line) <= columns else line[: columns - 2] + " …" for line in lines[first : first + rows]]


def _key(action: Action) -> _Key:
    return action.kind, action.stage, action.microbatch, action.peer


def _action(key: _Key) -> Action:
    kind, stage, microbatch, peer = key
    return Action(kind, stage, 0, microbatch, peer)
