"""How a training system works, as far as a prediction depends on it: what overlaps what, in a small file.

    format: stagewright.system
    version: 1
    name: synchronous
    blocking_sends: true
    reduction_overlaps: nothing

What a file leaves out is as in this library's own, `systems/stagewright.yaml`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stagewright.errors import StagewrightError, UsageError
from stagewright.schema import Saved, schema


@schema(error=UsageError)
class System(Saved):
    """The facts about a system that trains."""

    FORMAT: ClassVar[str] = "stagewright.system"
    ERROR: ClassVar[type[StagewrightError]] = UsageError

    name: str
    blocking_sends: bool = False
    """Whether a worker waits until what it sends has arrived, and computes nothing meanwhile."""
    reduction_overlaps: Literal["next-batch", "backward", "nothing"] = "next-batch"
    """What a worker computes while its gradients are reduced. `next-batch`: backward, and all that its order has before
    the update; `backward`: the rest of backward, then it waits; `nothing`: reductions begin after the last backward,
    and it waits."""
    optimizer_overlaps: bool = False
    """Whether a bucket is updated while the later ones are reduced, so that only the last is left to update."""
    bucket_bytes: int | None = Field(default=None, ge=0)
    """Bytes of gradients that are reduced in one piece; 0: all at once; None: as many pieces as the plan says."""
    all_reduce: Literal["fastest", "ring", "tree"] = "fastest"
    """How gradients are reduced; `fastest` takes the tree where latency is most of a ring's time."""
    folds: bool = True
    """Whether linear layers may make the weight gradients of several microbatches in one product."""
    adding_passes: float = Field(default=3.0, ge=0)
    """Passes over memory to add a microbatch's weight gradients to those before; 0 where the product does it."""
    copying_passes: float = Field(default=2.0, ge=0)
    """The same for a step of the optimizer to keep the old version of the weights, where there are several."""
    notes: tuple[str, ...] = ()
    """Where the facts come from."""

    def in_words(self) -> str:
        """`as megatron works: sends block, reductions overlap nothing`."""
        facts = [f"sends {'block' if self.blocking_sends else 'overlap computing'}"]
        facts += [f"reductions overlap {self.reduction_overlaps.replace('-', ' ')}"]
        facts += ["the optimizer overlaps reductions"] if self.optimizer_overlaps else []
        return f"as {self.name} works: {', '.join(facts)}"


OWN = System(name="stagewright")
"""How this library works."""
