"""The policies: one entry each with what it means, and how many microbatches it makes a replica hold.

All stages walk over the microbatches of an endless run of batches, g = 0, 1, 2 …  At g a stage first runs the forwards
up to its limit, then backward of g; each replica takes its own ones of these:

    limit(g) = min(g + ahead, the last microbatch of batch(g) + K − 1)

`ahead` never grows from a stage to the next, nor does the K that counts here. So whatever a stage wants forward of
before backward of g, the stage before it delivers without waiting for backward of g or later, and nothing can lock.
How many microbatches a replica holds follows from that alone: the planner, the simulator, the check before a launch
and the workers all ask `holds`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from stagewright.plan import Plan, Policy


class _Rule(NamedTuple):
    """What sets a policy apart; without any of these it is 1f1b."""

    all_forwards_first: bool = False
    """Every forward of a batch comes before its first backward."""
    halves: bool = False
    """Backward runs in two halves, of which the weights' fills what would be idle time; its products do not fold."""
    by_arrival: bool = False
    """A worker runs whatever is ready, backward first; its order only says what there is to do."""


RULES: Mapping[Policy, _Rule] = {
    "gpipe": _Rule(all_forwards_first=True),
    "1f1b": _Rule(),
    "interleaved": _Rule(),  # 1f1b, which alternates between a worker's stages wherever it has several
    "zero-bubble": _Rule(halves=True),
    "dynamic": _Rule(by_arrival=True),
}


DISTINCT = tuple(name for name in RULES if name != "interleaved")
"""Those that differ even where every worker has one stage."""


def lanes(plan: Plan) -> tuple[int, ...]:
    """How many microbatches each stage works on at a time: its replicas if they take turns, else one."""
    return plan.replicas if plan.route == "rotate" else (1,) * len(plan.stages)


def _warm_ups(plan: Plan) -> tuple[int, ...]:
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
    widths, wanted = lanes(plan), _warm_ups(plan)
    if RULES[plan.policy].all_forwards_first:
        return (plan.num_microbatches * max(plan.versions),) * len(widths)
    if plan.hold is not None:
        # A smaller hold cuts the warm-ups; a larger one stretches them all, to ride over slow links.
        spare, most = plan.hold - 1, max(1, *wanted)
        wanted = tuple(min(one, spare) if spare < most else one * spare // most for one in wanted)
    found = tuple(accumulate((one * width for one, width in zip(wanted, widths)), min))
    return found if plan.hold is None else tuple(accumulate(_within(plan, plan.hold, found), min))


def _within(plan: Plan, hold: int, found: tuple[int, ...]) -> Iterator[int]:
    """Where a batch ends, two own microbatches can stand closer than elsewhere: shrinks `ahead` until hold is kept."""
    for ahead, width, depth in zip(found, lanes(plan), reach(plan)):
        while held(plan.num_microbatches, width, ahead, depth) > hold:
            ahead -= 1
        yield ahead


@lru_cache(maxsize=1 << 16)
def held(num_microbatches: int, width: int, ahead: int, depth: int) -> int:
    """The most microbatches that a replica of a stage holds at once, `width` of them taking turns.

    The fullest one has own microbatches 0, width, 2 · width … of every batch. Before backward of its i-th of batch 0 it
    has run forward of all that lie within the limit, in each of the `depth` batches:

        max over i of Σ over b of how many of its own lie in [i · width, i · width + ahead] − b · num_microbatches
    """
    own = -(-num_microbatches // width)
    most = 0
    for first in range(own):
        last = [(first * width + ahead - batch * num_microbatches) // width for batch in range(depth)]
        before_0 = min(last[0] + 1, own) - first
        most = max(most, before_0 + sum(min(max(each + 1, 0), own) for each in last[1:]))
    return most


def holds(plan: Plan) -> tuple[int, ...]:
    """How many microbatches' activations a replica of each stage holds at most, as its schedule's order has it.

    Where orders are found by trying (backward in halves, several stages on a worker) it may turn out to be fewer.
    """
    found = outstanding(plan)
    if not RULES[plan.policy].halves or not plan.is_synchronous:
        return found
    # The weights' half of a later stage waits until as much is held there as in the fullest one.
    return tuple(min(max(found), -(-plan.num_microbatches // width)) for width in lanes(plan))


def outstanding(plan: Plan) -> tuple[int, ...]:
    """How many microbatches a replica of each stage has run forward at most whose gradients have not left it yet."""
    widths = lanes(plan)
    return tuple(map(held, [plan.num_microbatches] * len(widths), widths, aheads(plan), reach(plan)))
