"""What a person fixes about a plan; everything left at None is chosen by the search, or has the default named here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from stagewright.cluster import parse_ratio
from stagewright.errors import UsageError
from stagewright.plan import POLICIES, ROUTES, Policy, Route

RatioOf = Literal["time", "flops", "params", "layers"]
_RATIO_OF: tuple[RatioOf, ...] = get_args(RatioOf)
_STALENESS = r"0|none|ssp|2bw|any|\d{1,4}(,\d{1,4})*"
"""How it may be written; what it means for so many stages is `plan.parse_staleness`'s."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of `plan`, `simulate` and `train` that shape a plan."""

    batch: int | None = None
    """rows of one optimizer step, over all devices"""
    batch_per_device: int | None = None
    """rows of one replica of the first stage, a step; instead of --batch"""
    placement: str | None = None
    """stages on devices, such as 0:0-6.0:7; empty is data parallelism over every device"""
    ratio: str | None = None
    """how the stages' costs stand, such as 11:7; by default as their devices' speeds do"""
    ratio_of: RatioOf = "time"
    """what the ratio is of"""
    cut: tuple[str, ...] = ()
    """the layers that begin new stages, such as fc1,fc2, instead of a ratio"""
    num_microbatches: int | None = None
    """pieces of a batch that follow one another; 1 where nothing is searched"""
    staleness: str | None = None
    """0: exact, ssp, 2bw, or versions a stage such as 2,1; 0 where nothing is searched"""
    policy: Policy | None = None
    """the order of forwards and backwards; 1f1b where nothing is searched"""
    route: Route | None = None
    """whether each replica takes rows of every microbatch or whole ones; split where nothing is searched"""
    hold: int | None = None
    """microbatches whose activations a replica may hold"""
    recompute: bool | None = None
    """run forward again instead of keeping activations; no where nothing is searched"""
    shard_optimizer: bool | None = None
    """share the optimizer's states out among the replicas of each stage (ZeRO stage 1)"""
    num_buckets: int | None = None
    """pieces that a stage's gradients are reduced in; by default as many as their size asks for"""

    def __post_init__(self) -> None:
        for key in ("batch", "batch_per_device", "num_microbatches", "hold", "num_buckets"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UsageError(f"{spelled(key)} is {value}: expected 1 or more")
        for key, known in (("policy", POLICIES), ("route", ROUTES), ("ratio_of", _RATIO_OF)):
            value = getattr(self, key)
            if value is not None and value not in known:
                raise UsageError(f"{spelled(key)} is {value!r}: expected one of {', '.join(known)}")
        if self.staleness is not None and not re.fullmatch(_STALENESS, self.staleness, re.ASCII):
            raise UsageError(
                f"--staleness is {self.staleness!r}: expected 0, ssp, 2bw, or versions of each stage such as 2,1"
            )
        if self.batch is not None and self.batch_per_device is not None:
            raise UsageError("--batch and --batch-per-device are both given", "leave one of them out")
        if self.ratio is not None and self.cut:
            raise UsageError("--ratio and --cut are both given, and both say where to cut", "leave one of them out")

    def rows(self, first_replicas: int) -> int:
        """The rows of one step, where the first stage has so many replicas."""
        if self.batch is not None:
            return self.batch
        if self.batch_per_device is None:
            raise UsageError("the batch is not given", "add --batch ROWS or --batch-per-device ROWS")
        return self.batch_per_device * first_replicas

    @property
    def shares(self) -> tuple[float, ...] | None:
        """The ratio as numbers."""
        return None if self.ratio is None else parse_ratio(self.ratio)


def spelled(key: str) -> str:
    """The option of a field, as people type it."""
    words = {"num_microbatches": "microbatches", "policy": "schedule", "num_buckets": "buckets"}
    return "--" + words.get(key, key).replace("_", "-")
