"""In which order the stages compute, microbatch by microbatch: what follows what, in one turn of the loop.

How far forward runs ahead of backward is the policy's (`stagewright.policy`). One turn is the M microbatches of one
batch, whatever batches the forwards belong to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from stagewright.plan import Plan
from stagewright.policy import RULES, aheads, reach
from stagewright.schedule import Kind


class Step(NamedTuple):
    """What a stage does next: all of its replicas, each on its own rows; stage −1 is everyone."""

    kind: Kind
    stage: int
    batch: int
    """Relative to the turn."""
    microbatch: int = -1


def _limit(at: int, ahead: int, depth: int, num_microbatches: int) -> int:
    """The last microbatch whose forward comes before backward of `at`."""
    return min(at + ahead, (at // num_microbatches + depth) * num_microbatches - 1)


def steps(plan: Plan, agree: bool = False) -> Iterator[Step]:
    """One turn of all stages, in an order in which everything comes after what it needs.

    F0.1 F1.0  B1.0 B0.0  U1 U0        (stages 0 and 1, K = 2 and 1, one microbatch a batch: F0 is a batch ahead)
    """
    num, depths, ahead = plan.num_microbatches, reach(plan), aheads(plan)
    stages = range(len(plan.stages))
    split_backward = RULES[plan.policy].halves
    for at in range(num):
        lasts = [_limit(at, ahead[stage], depths[stage], num) for stage in stages]
        for stage in stages:
            for number in range(_limit(at - 1, ahead[stage], depths[stage], num) + 1, lasts[stage] + 1):
                yield Step(Kind.FORWARD, stage, number // num, number % num)
        for stage in reversed(stages):
            yield Step(Kind.BACKWARD_INPUT if split_backward else Kind.BACKWARD, stage, 0, at)
            if split_backward:
                yield Step(Kind.BACKWARD_WEIGHT, stage, 0, at)
        if agree and at == num - 1:
            yield Step(Kind.AGREE, -1, 0)
        for stage in reversed(stages):
            # As late as the versions allow: just before forward enters the batch that needs the update.
            entered = _limit(at + 1, ahead[stage], depths[stage], num) // num
            if entered > lasts[stage] // num:
                yield Step(Kind.UPDATE, stage, entered - plan.versions[stage])
