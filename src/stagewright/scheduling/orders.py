"""In which order the stages compute: how far forward runs ahead of backward, and what follows what.

All stages walk over the microbatches of an endless run of batches, g = 0, 1, 2 …  At g a stage first runs the forwards
up to its limit, then backward of g; each replica takes its own ones of these:

    limit(g) = min(g + ahead, the last microbatch of batch(g) + K − 1)

`ahead` never grows from a stage to the next, nor does the K that counts here. So whatever a stage wants forward of
before backward of g, the stage before it delivers without waiting for backward of g or later, and nothing can lock.
One turn of the loop is the M microbatches of one batch, whatever batches the forwards belong to.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from stagewright.errors import ScheduleError
from stagewright.plan import Plan
from stagewright.schedule import Kind
from stagewright.scheduling.routing import lanes


class Step(NamedTuple):
    """What a stage does next: all of its replicas, each on its own rows; stage −1 is everyone."""

    kind: Kind
    stage: int
    batch: int
    """Relative to the turn."""
    microbatch: int = -1


def warm_ups(plan: Plan) -> tuple[int, ...]:
    """How many of its microbatches a replica runs forward before its first backward under 1f1b.

    ceil(sum of later stages' lanes / own lanes): the textbook's num_stages − stage − 1 under `split`.
    """
    widths = lanes(plan)
    return tuple(-(-sum(widths[stage + 1 :]) // width) for stage, width in enumerate(widths))


def reach(plan: Plan) -> tuple[int, ...]:
    """Of how many batches a stage may have activations: its K, or that of an earlier stage which holds it back."""
    return tuple(accumulate(plan.versions, min))


def aheads(plan: Plan) -> tuple[int, ...]:
    """How many microbatches, over all replicas, forward of each stage runs ahead of backward; it never grows."""
    widths, wanted = lanes(plan), warm_ups(plan)
    if plan.policy == "gpipe":
        return (plan.num_microbatches * max(plan.versions),) * len(widths)
    if plan.hold is not None:
        # A smaller hold cuts the warm-ups; a larger one stretches them all, to ride over slow links.
        spare, most = plan.hold - 1, max(1, *wanted)
        wanted = tuple(min(one, spare) if spare < most else one * spare // most for one in wanted)
    found = tuple(accumulate((one * width for one, width in zip(wanted, widths)), min))
    return found if plan.hold is None else tuple(accumulate(_within(plan, found), min))


def _within(plan: Plan, found: tuple[int, ...]) -> Iterator[int]:
    """Where a batch ends, two own microbatches can stand closer than elsewhere: shrinks `ahead` until hold is kept."""
    for stage, ahead in enumerate(found):
        while plan.hold is not None and held(plan, stage, ahead) > plan.hold:
            ahead -= 1
        yield ahead


def held(plan: Plan, stage: int, ahead: int) -> int:
    """The most microbatches whose activations a replica of a stage holds at once, given how far forward runs ahead."""
    num, width, depth = plan.num_microbatches, lanes(plan)[stage], reach(plan)[stage]
    most = 0
    for lane in range(min(width, num)):
        own = [batch * num + number for batch in range(depth + 1) for number in range(lane, num, width)]
        stop = 0
        for start, first in enumerate(own[: len(own) // (depth + 1)]):
            last = limit(first, ahead, depth, num)
            while stop < len(own) and own[stop] <= last:
                stop += 1
            most = max(most, stop - start)
    return most


def holds(plan: Plan) -> tuple[int, ...]:
    """How many microbatches' activations a replica of each stage holds at most."""
    found = tuple(held(plan, stage, ahead) for stage, ahead in enumerate(aheads(plan)))
    if plan.policy == "zero-bubble" and plan.is_synchronous:
        return (max(found),) * len(found)
    if plan.policy == "gpipe" and plan.hold is not None and max(found) > plan.hold:
        stage = found.index(max(found))
        raise ScheduleError(
            f"hold {plan.hold} cannot work: under gpipe stage {stage} runs all of its {found[stage]} forwards first",
            f"use hold {found[stage]}, fewer microbatches, or policy 1f1b",
        )
    return found


def limit(at: int, ahead: int, depth: int, num_microbatches: int) -> int:
    """The last microbatch whose forward comes before backward of `at`."""
    return min(at + ahead, (at // num_microbatches + depth) * num_microbatches - 1)


def steps(plan: Plan, agree: bool = False) -> Iterator[Step]:
    """One turn of all stages, in an order in which everything comes after what it needs.

    F0.1 F1.0  B1.0 B0.0  U1 U0        (stages 0 and 1, K = 2 and 1, one microbatch a batch: F0 is a batch ahead)
    """
    num, depths, ahead = plan.num_microbatches, reach(plan), aheads(plan)
    stages = range(len(plan.stages))
    split_backward = plan.policy == "zero-bubble"
    for at in range(num):
        lasts = [limit(at, ahead[stage], depths[stage], num) for stage in stages]
        for stage in stages:
            for number in range(limit(at - 1, ahead[stage], depths[stage], num) + 1, lasts[stage] + 1):
                yield Step(Kind.FORWARD, stage, number // num, number % num)
        for stage in reversed(stages):
            yield Step(Kind.BACKWARD_INPUT if split_backward else Kind.BACKWARD, stage, 0, at)
            if split_backward:
                yield Step(Kind.BACKWARD_WEIGHT, stage, 0, at)
        if agree and at == num - 1:
            yield Step(Kind.AGREE, -1, 0)
        for stage in reversed(stages):
            # As late as the versions allow: just before forward enters the batch that needs the update.
            entered = limit(at + 1, ahead[stage], depths[stage], num) // num
            if entered > lasts[stage] // num:
                yield Step(Kind.UPDATE, stage, entered - plan.versions[stage])
