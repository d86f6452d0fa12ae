"""Is a schedule right? Nothing of how it was made is used here: only the plan, the actions and their meaning.

An order repeats, turn after turn; action number i of L, with batch offset o, stands for batch b at the place

    place(b) = i + (b − o) · L        so that "before" and "after" are comparisons of numbers, for all batches at once

Two workers issue what passes between them in the same sequence; then a transfer that must meet its counterpart
completes as soon as one that is buffered, and a single run shows that both kinds come to an end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple, NoReturn

from stagewright.errors import ScheduleError
from stagewright.plan import Plan
from stagewright.schedule import SENDS, TRANSFERS, Action, Kind, Schedule, format_order
from stagewright.scheduling.ideal import run_ideally
from stagewright.scheduling.routing import make_routes

_Key = tuple[Kind, int, int, int]
"""An action without its batch: kind, stage, microbatch, peer."""

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def check_schedule(schedule: Schedule, num_batches: int | None = None) -> None:
    """Raises a ScheduleError with the reason, the action and the grid unless the schedule is right."""
    if num_batches is not None:
        check_batches(schedule.plan, num_batches)
    owned = _ownership(schedule.plan)
    for worker in range(len(schedule.orders)):
        places = _check_actions(schedule, worker, owned)
        _check_places(schedule, worker, owned, places)
        _check_held(schedule, worker)
    _check_pairs(schedule)
    _check_collectives(schedule)
    _check_completion(schedule, schedule.num_batches_drawn if num_batches is None else num_batches)


def check_batches(plan: Plan, num_batches: int) -> None:
    """Refuses a run that is too short for the versions the plan keeps."""
    if num_batches < max(plan.versions):
        raise ScheduleError(
            f"{max(plan.versions)} weight versions in a run of {num_batches} batches: some would never be used",
            f"run at least {max(plan.versions)} batches, or keep at most {max(num_batches, 1)} versions",
        )


class _Partners(NamedTuple):
    """With whom one worker exchanges the rows of one microbatch of a stage."""

    before: tuple[int, ...]
    """The workers that hold its rows in the stage before; itself, where the rows stay."""
    after: tuple[int, ...]


_Ownership = list[dict[int, list[tuple[int, _Partners]]]]
"""[worker][stage]: the microbatches that the worker handles there."""


def _ownership(plan: Plan) -> _Ownership:
    """Who has to do what, from the routes alone."""
    routes = make_routes(plan)
    owned: _Ownership = [{stage: [] for stage in stages} for stages in plan.stages_of]
    for stage, workers in enumerate(plan.workers):
        for number, shares in enumerate(routes.own[stage]):
            for replica, _ in shares:
                before = routes.sources[stage - 1][number][replica] if stage else ()
                after = routes.targets[stage][number][replica] if stage + 1 < len(plan.stages) else ()
                held_before = tuple(plan.workers[stage - 1][one] for one in before)
                held_after = tuple(plan.workers[stage + 1][one] for one in after)
                owned[workers[replica]][stage].append((number, _Partners(held_before, held_after)))
    return owned


def _check_actions(schedule: Schedule, worker: int, owned: _Ownership) -> dict[_Key, int]:
    """Every action that the worker owes stands in its order once, and no other; the place of each for batch 0."""
    order = schedule.orders[worker]
    places: dict[_Key, int] = {}
    for number, (kind, stage, batch, microbatch, peer) in enumerate(order):
        key = (kind, stage, microbatch, peer)
        if key in places:
            _fail(schedule, worker, order[number], "it stands in the order twice")
        places[key] = number - batch * len(order)
    wanted = set(_expected(schedule, worker, owned, places))
    for key in sorted(wanted - places.keys()):
        _fail(schedule, worker, _action(key), "it is missing")
    for key in sorted(places.keys() - wanted):
        _fail(schedule, worker, _action(key), "nothing in the plan asks for it")
    return places


def _expected(schedule: Schedule, worker: int, owned: _Ownership, places: dict[_Key, int]) -> Iterator[_Key]:
    """All that a worker owes a batch; whether backward goes in halves is up to the schedule."""
    plan = schedule.plan
    for stage, works in owned[worker].items():
        for number, work in works:
            yield _FORWARD, stage, number, -1
            if (_INPUT, stage, number, -1) in places:
                yield _INPUT, stage, number, -1
                yield _WEIGHT, stage, number, -1
            else:
                yield _BACKWARD, stage, number, -1
            yield from _transfer_keys(worker, stage, number, work)
        if plan.replicas[stage] > 1:
            yield from ((Kind.REDUCE, stage, -1, bucket) for bucket in range(plan.stages[stage].num_buckets))
        yield Kind.UPDATE, stage, -1, -1
    if schedule.agree:
        yield Kind.AGREE, -1, -1, -1


def _transfer_keys(worker: int, stage: int, number: int, work: _Partners) -> Iterator[_Key]:
    """What the worker sends and receives for a microbatch of a stage."""
    for peer in work.before:
        if peer != worker:
            yield Kind.RECEIVE_FORWARD, stage - 1, number, peer
            yield Kind.SEND_BACKWARD, stage, number, peer
    for peer in work.after:
        if peer != worker:
            yield Kind.SEND_FORWARD, stage, number, peer
            yield Kind.RECEIVE_BACKWARD, stage + 1, number, peer


def _check_places(schedule: Schedule, worker: int, owned: _Ownership, places: dict[_Key, int]) -> None:
    """Everything stands after what it needs and before what needs it, in every batch."""
    rules = _Rules(schedule, worker, places)
    for stage, works in owned[worker].items():
        lasts = [rules.microbatch(stage, number, work) for number, work in works]
        firsts: list[_Key] = [(_FORWARD, stage, number, -1) for number, _ in works]
        rules.batch(stage, lasts, firsts)


class _Rules:
    """The places of one worker's actions, and who must stand before whom."""

    def __init__(self, schedule: Schedule, worker: int, places: dict[_Key, int]) -> None:
        self.schedule, self.worker, self.places = schedule, worker, places
        self.length = len(schedule.orders[worker])

    def before(self, first: _Key, second: _Key, batches: int = 0) -> None:
        """`first` of a batch must stand before `second` of the batch that comes `batches` later."""
        if self.places[first] >= self.places[second] + batches * self.length:
            whose = "" if not batches else f" of batch n{-batches:+d}"
            _fail(
                self.schedule,
                self.worker,
                _action(second),
                f"of batch n it must come after {_action(first)}{whose}, but stands before it",
            )

    def microbatch(self, stage: int, number: int, work: _Partners) -> _Key:
        """The rules of one microbatch; its last action that makes gradients."""
        forward, backward, last = ((kind, stage, number, -1) for kind in (_FORWARD, _BACKWARD, _WEIGHT))
        if backward in self.places:
            last = backward
        else:
            backward = (_INPUT, stage, number, -1)
            self.before(backward, last)
        self.before(forward, backward)
        for peer in work.before:
            self.with_stage_before(stage, number, peer, forward, backward)
        for peer in work.after:
            self.with_stage_after(stage, number, peer, forward, backward)
        return last

    def with_stage_before(self, stage: int, number: int, peer: int, forward: _Key, backward: _Key) -> None:
        """Forward needs the rows that `peer` has, who needs the gradients."""
        if peer == self.worker:
            self.before((_FORWARD, stage - 1, number, -1), forward)
        else:
            self.before((Kind.RECEIVE_FORWARD, stage - 1, number, peer), forward)
            self.before(backward, (Kind.SEND_BACKWARD, stage, number, peer))

    def with_stage_after(self, stage: int, number: int, peer: int, forward: _Key, backward: _Key) -> None:
        """Backward needs the gradients that `peer` has, who needs the rows."""
        if peer == self.worker:
            whole = (_BACKWARD, stage + 1, number, -1)
            self.before(whole if whole in self.places else (_INPUT, stage + 1, number, -1), backward)
        else:
            self.before(forward, (Kind.SEND_FORWARD, stage, number, peer))
            self.before((Kind.RECEIVE_BACKWARD, stage + 1, number, peer), backward)

    def batch(self, stage: int, lasts: list[_Key], firsts: list[_Key]) -> None:
        """The rules of a whole batch: reductions after backward, then the update, and K batches later the forwards."""
        before, plan = self.before, self.schedule.plan
        update: _Key = (Kind.UPDATE, stage, -1, -1)
        agreement: list[_Key] = [(Kind.AGREE, -1, -1, -1)] if self.schedule.agree else []
        num_buckets = plan.stages[stage].num_buckets if plan.replicas[stage] > 1 else 0
        for bucket in range(num_buckets):
            reduction: _Key = (Kind.REDUCE, stage, -1, bucket)
            for key in (update, *agreement):
                before(reduction, key)
            for last in lasts:
                before(last, reduction)
        for key in (update, *agreement):
            for last in lasts:
                before(last, key)
        for key in agreement:
            before(key, update)
        for forward in firsts:
            before(update, forward, plan.versions[stage])


def _check_held(schedule: Schedule, worker: int) -> None:
    """No replica holds the activations of more microbatches than the plan's bound, in the steady state."""
    hold, order = schedule.plan.hold, schedule.orders[worker]
    if hold is None:
        return
    # A forward that is d batches ahead of its backward leaves d activations behind at the end of every turn.
    held: dict[int, int] = {}
    for kind, stage, batch, _, _ in order:
        sign = 1 if kind is _FORWARD else -1 if kind is _BACKWARD or kind is _WEIGHT else 0
        held[stage] = held.get(stage, 0) + sign * batch
    for action in order:
        if action.kind is _FORWARD:
            held[action.stage] += 1
            if held[action.stage] > hold:
                _fail(
                    schedule,
                    worker,
                    action,
                    f"it is one activation more than the {hold} that stage {action.stage} may hold",
                )
        elif action.kind is _BACKWARD or action.kind is _WEIGHT:
            held[action.stage] -= 1


_Operation = tuple[int, ...]
"""Something that several workers do together, without its batch."""


def _check_pairs(schedule: Schedule) -> None:
    """Two workers issue what passes between them in the same sequence, whichever of them sends."""
    lists: dict[tuple[int, int], list[tuple[_Operation, int]]] = {}
    for worker, order in enumerate(schedule.orders):
        for kind, stage, batch, number, peer in order:
            if kind in TRANSFERS:
                is_forward = kind is Kind.SEND_FORWARD or kind is Kind.RECEIVE_FORWARD
                sender = worker if kind in SENDS else peer
                lists.setdefault((worker, peer), []).append(((is_forward, stage, number, sender), batch))
    for (worker, peer), mine in lists.items():
        if worker < peer:
            fault = first_difference(mine, lists.get((peer, worker), []))
            if fault is not None:
                transfers = [
                    action for action in schedule.orders[worker] if action.kind in TRANSFERS and action.peer == peer
                ]
                _fail(
                    schedule, worker, transfers[fault], f"worker {peer} issues another transfer of theirs at this point"
                )


def _check_collectives(schedule: Schedule) -> None:
    """Two workers issue the reductions that they share, and the agreement, in the same sequence."""
    stages_of = list(map(set, schedule.plan.stages_of))
    pairs = {pair for workers in schedule.plan.workers for pair in zip(workers, workers[1:])}
    # One common stage makes a chain of equal lists; with several, any two workers could disagree.
    several = [worker for worker, stages in enumerate(stages_of) if len(stages) > 1]
    pairs |= {pair for pair in combinations(several, 2) if len(stages_of[pair[0]] & stages_of[pair[1]]) > 1}
    for worker, peer in sorted(pairs):
        common = stages_of[worker] & stages_of[peer] | {-1}
        mine, theirs = (_collectives(schedule.orders[one], common) for one in (worker, peer))
        fault = first_difference(mine, theirs)
        if fault is not None:
            (kind, stage, bucket), batch = mine[fault]
            action = Action(Kind.REDUCE if kind else Kind.AGREE, stage, batch, -1, bucket)
            _fail(schedule, worker, action, f"worker {peer} issues another reduction or agreement at this point")


def _collectives(order: Sequence[Action], stages: set[int]) -> list[tuple[_Operation, int]]:
    """The reductions and agreements of some stages, in their order."""
    return [
        ((kind is Kind.REDUCE, stage, peer), batch)
        for kind, stage, batch, _, peer in order
        if (kind is Kind.REDUCE or kind is Kind.AGREE) and stage in stages
    ]


def first_difference(mine: list[tuple[_Operation, int]], theirs: list[tuple[_Operation, int]]) -> int | None:
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


def _check_completion(schedule: Schedule, num_batches: int) -> None:
    """The run ends: with buffered sends and, since sequences are equal, with sends that meet their receipts."""
    stuck = run_ideally(schedule, num_batches).stuck
    if stuck:
        worker, action = next(iter(stuck.items()))
        others = ", ".join(
            f"{one} at {theirs._replace(batch=0)} of batch {theirs.batch}" for one, theirs in list(stuck.items())[:8]
        )
        _fail(schedule, worker, action, f"it waits for ever; workers wait: {others}")


def _fail(schedule: Schedule, worker: int, action: Action, reason: str) -> NoReturn:
    """Raises the error that shows a fault: the reason, the action among its neighbours, and the grid."""
    around = _neighbours(schedule.orders[worker], action)
    raise ScheduleError(
        f"worker {worker}, {action._replace(batch=0)}: {reason}",
        "\n".join([f"{worker} │ {around}", "", *_small_grid(schedule, worker)]),
    )


def _neighbours(order: Sequence[Action], action: Action, reach: int = 5) -> str:
    """An order's actions around one of them, which is marked."""
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
