"""Layers → stages, stages → devices, weight versions, microbatches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, Literal, NamedTuple, TypeVar, get_args

from pydantic import Field

from stagewright.cluster import DeviceId, Devices, format_placement
from stagewright.errors import PlanError, StagewrightError
from stagewright.schema import Saved, schema, twin

Route = Literal["split", "rotate"]
Policy = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "dynamic"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
ROUTES: tuple[Route, ...] = get_args(Route)
DEFAULT_POLICY: Policy = "1f1b"


@schema(error=PlanError)
class Stage:
    """Consecutive layers, and the devices that hold a replica of them each."""

    layers: tuple[str, ...] = Field(min_length=1)
    devices: Devices = Field(min_length=1)
    versions: int = Field(default=1, ge=1)
    """K: forward and backward of batch n use the weights after updates 0 … n − K."""
    recompute: bool = False
    """Keep only the stage's input, and run forward again before backward."""
    shard_optimizer: bool = False
    """Each replica keeps and updates a share of the optimizer's states, and gives out the weights that it made."""
    num_buckets: int = Field(default=1, ge=1)
    """How many pieces its gradients are reduced in."""
    row_weights: tuple[float, ...] | None = None
    """How a split microbatch's rows are shared out, one weight a replica; None is evenly."""

    def __post_init__(self) -> None:
        weights = self.row_weights
        if weights is not None and (len(weights) != len(self.devices) or min(weights) <= 0):
            raise PlanError(
                f"key row_weights is {list(weights)}: expected {len(self.devices)} positive numbers, one a replica"
            )


class Share(NamedTuple):
    """The rows start … stop − 1 of a batch, which one replica handles."""

    replica: int
    start: int
    stop: int


@schema(error=PlanError)
class Plan(Saved):
    """How a model is trained on a cluster."""

    FORMAT: ClassVar[str] = "stagewright.plan"
    ERROR: ClassVar[type[StagewrightError]] = PlanError

    model: str
    stages: tuple[Stage, ...] = Field(min_length=1)
    batch: int = Field(ge=1)
    """The rows of one optimizer step, over all devices."""
    num_microbatches: int = Field(default=1, ge=1)
    route: Route = "split"
    policy: Policy = DEFAULT_POLICY
    hold: int | None = Field(default=None, ge=1)
    """How many microbatches' activations a replica may hold; None is what the policy wants."""
    notes: tuple[str, ...] = ()
    """Why this plan was chosen."""
    predicted_step_s: float | None = Field(default=None, gt=0)
    """How long a step takes, as predicted when it was chosen."""
    predicted_on: str = ""
    """The cluster for which that was."""
    predicted_compute_s: tuple[float, ...] = ()
    """For each stage how long a replica of it computes in a step, as predicted."""
    predicted_send_s: tuple[float, ...] = ()
    """For each stage how long a worker of it sends in a step, to other stages and replicas."""

    def __post_init__(self) -> None:
        names = self.layers
        if len(set(names)) < len(names):
            raise PlanError(f"layer {twin(names)} is in the plan twice: expected each layer once")
        if self.num_microbatches > self.batch:
            raise PlanError(
                f"a batch of {self.batch} rows cannot be cut into {self.num_microbatches} microbatches",
                f"use at most {self.batch} microbatches, or a larger batch",
            )
        for number, stage in enumerate(self.stages):
            if len(set(stage.devices)) < len(stage.devices):
                raise PlanError(f"stage {number} names a device twice: {format_placement([stage.devices])}")

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Every layer's name, in order."""
        return tuple(name for stage in self.stages for name in stage.layers)

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """The numbers of the layers that begin the stages, and of layers in all: (0, 16, 22)."""
        return (0, *accumulate(len(stage.layers) for stage in self.stages))

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """How many replicas each stage has: (7, 1)."""
        return tuple(len(stage.devices) for stage in self.stages)

    @cached_property
    def versions(self) -> tuple[int, ...]:
        """K of each stage."""
        return tuple(stage.versions for stage in self.stages)

    @cached_property
    def shard_optimizer(self) -> tuple[bool, ...]:
        """For each stage whether its replicas share out the optimizer's states; one replica alone has nothing to."""
        return tuple(stage.shard_optimizer and len(stage.devices) > 1 for stage in self.stages)

    @property
    def sharing(self) -> str:
        """Which stages share out the optimizer's states, in words: `sharded states in stage 0`; empty without any."""
        own = [str(number) for number, is_sharded in enumerate(self.shard_optimizer) if is_sharded]
        return f"sharded states in stage {', '.join(own)}" if own else ""

    @cached_property
    def devices(self) -> tuple[DeviceId, ...]:
        """The devices in use, sorted; worker w runs on the w-th."""
        return tuple(sorted({id for stage in self.stages for id in stage.devices}))

    @property
    def placement(self) -> str:
        """The placement string."""
        return format_placement([stage.devices for stage in self.stages])

    @property
    def is_synchronous(self) -> bool:
        """True when every stage keeps one version: exact training, with a flush."""
        return all(versions == 1 for versions in self.versions)

    @cached_property
    def workers(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the worker of each of its replicas."""
        number = {device: worker for worker, device in enumerate(self.devices)}
        return tuple(tuple(number[device] for device in stage.devices) for stage in self.stages)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """For each worker the stages that it runs."""
        found: list[list[int]] = [[] for _ in self.devices]
        for stage, workers in enumerate(self.workers):
            for worker in workers:
                found[worker].append(stage)
        return tuple(map(tuple, found))

    def host_workers(self, num_hosts: int) -> tuple[int, ...]:
        """For each of the hosts how many workers run there."""
        return tuple(sum(id.host == host for id in self.devices) for host in range(num_hosts))

    def shares(self, stage: int, microbatch: int) -> tuple[Share, ...]:
        """Which replica of a stage handles which rows of a microbatch, in the order of rows; none without rows."""
        start, stop = _microbatch_rows(self.batch, self.num_microbatches, microbatch)
        num_replicas = self.replicas[stage]
        if start == stop:
            return ()
        if self.route == "rotate":
            return (Share(microbatch % num_replicas, start, stop),)
        edges = split_edges(stop - start, self.stages[stage].row_weights or (1.0,) * num_replicas)
        pairs = enumerate(zip(edges, edges[1:]))
        return tuple(Share(replica, start + low, start + high) for replica, (low, high) in pairs if low < high)

    def transfers(self, boundary: int, microbatch: int) -> list[tuple[int, int, int, int]]:
        """(replica of stage `boundary`, replica of the next stage, first row, end) wherever rows pass between them."""
        return overlaps(self.shares(boundary, microbatch), self.shares(boundary + 1, microbatch))

    def peers(self, stage: int, microbatch: int) -> Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        """For each replica that has rows of a microbatch those of the stage before and of the next that share them."""
        key = stage, self.patterns[microbatch]
        if key not in self._peers:
            before = self.transfers(stage - 1, microbatch) if stage else []
            after = self.transfers(stage, microbatch) if stage + 1 < len(self.stages) else []
            self._peers[key] = {
                share.replica: (
                    tuple([source for source, target, _, _ in before if target == share.replica]),
                    tuple([target for source, target, _, _ in after if source == share.replica]),
                )
                for share in self.shares(stage, microbatch)
            }
        return self._peers[key]

    @cached_property
    def _peers(self) -> dict[tuple[int, tuple[int, int]], dict[int, tuple[tuple[int, ...], tuple[int, ...]]]]:
        return {}

    @cached_property
    def patterns(self) -> tuple[tuple[int, int], ...]:
        """For each microbatch (its rows, its place in the turns of the replicas): equal ones are shared out alike."""
        cycle = math.lcm(*self.replicas) if self.route == "rotate" else 1
        edges = (_microbatch_rows(self.batch, self.num_microbatches, n) for n in range(self.num_microbatches))
        return tuple((stop - start, number % cycle) for number, (start, stop) in enumerate(edges))


_Who = TypeVar("_Who")
_Edge = TypeVar("_Edge", int, float)


def overlaps(
    sources: Sequence[tuple[_Who, _Edge, _Edge]], targets: Sequence[tuple[_Who, _Edge, _Edge]]
) -> list[tuple[_Who, _Who, _Edge, _Edge]]:
    """The rows that each pair of shares (who, first row, end) has in common; both lists are in the order of the rows.

    stage 0, two replicas   │ rows 0 1 2 │ rows 3 4 5 │
    stage 1, three replicas │ rows 0 1 │ 2 3 │ 4 5 │        0 → 0, 0 → 1, 1 → 1, 1 → 2: each row once
    """
    found: list[tuple[_Who, _Who, _Edge, _Edge]] = []
    left = right = 0
    while left < len(sources) and right < len(targets):
        source, low, high = sources[left]
        target, first, last = targets[right]
        if max(low, first) < min(high, last):
            found.append((source, target, max(low, first), min(high, last)))
        left, right = left + (high <= last), right + (last <= high)
    return found


def _microbatch_rows(rows: int, num_microbatches: int, microbatch: int) -> tuple[int, int]:
    """First row and end of a microbatch; sizes differ by one row at most."""
    return rows * microbatch // num_microbatches, rows * (microbatch + 1) // num_microbatches


def split_edges(rows: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    """The rows at which a microbatch is cut so that the pieces stand as the weights: (0, 3, 6, 10) for 3 : 3 : 4."""
    if len(set(weights)) == 1:
        return tuple(rows * number // len(weights) for number in range(len(weights) + 1))
    total, edges, passed = sum(weights), [0], 0.0
    for weight in weights:
        passed += weight
        edges.append(round(rows * passed / total))
    return (*edges[:-1], rows)


def parse_staleness(text: str, num_stages: int) -> tuple[int, ...]:
    """K of each stage: `0` is 1 everywhere, `ssp` num_stages − stage, `2bw` 2 everywhere, `3,2,1` itself."""
    if text in ("0", "none"):
        return (1,) * num_stages
    if text == "ssp":
        return tuple(num_stages - stage for stage in range(num_stages))
    if text == "2bw":
        return (2,) * num_stages
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and 0 < len(part) <= 4 and int(part) > 0 for part in parts):
        raise PlanError(f"staleness {text!r}: expected 0, ssp, 2bw, or one number of versions a stage, such as 2,1")
    if len(parts) != num_stages:
        raise PlanError(f"staleness {text!r} names {len(parts)} stages, but the plan has {num_stages}")
    return tuple(int(part) for part in parts)
