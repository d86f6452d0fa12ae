"""What our runtime is measured against, each in the form that its own documentation recommends.

single       the ordinary loop in one process
ddp          torch's DistributedDataParallel, gradients as views of its buckets
pipelining   torch.distributed.pipelining, 1F1B; with several replicas each stage is wrapped in DDP

All train the same model on the same rows with the same optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stagewright.models import Layered, StageModule
from stagewright.runtime.world import World

Step = Callable[[int], None]
"""Runs a number of optimizer steps."""


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of every contender."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


@dataclass(frozen=True)
class Rows:
    """One batch, the same for everyone."""

    inputs: tuple[Tensor, ...]
    labels: Tensor

    def to(self, device: torch.device) -> Rows:
        """The same on a device."""
        return Rows(tuple(tensor.to(device) for tensor in self.inputs), self.labels.to(device))

    def part(self, number: int, count: int) -> Rows:
        """The rows of one of several workers that share them evenly."""
        size = len(self.labels)
        own = slice(size * number // count, size * (number + 1) // count)
        return Rows(tuple(tensor[own] for tensor in self.inputs), self.labels[own])


def make_rows(model: Layered, batch: int) -> Rows:
    """A batch of made-up rows for a model with one target of whole numbers."""
    generator = torch.Generator().manual_seed(0)
    classes = prediction_width(model)

    def made(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if dtype.is_floating_point:
            return torch.randn(batch, *shape, generator=generator)
        return torch.randint(classes, (batch, *shape), generator=generator)

    inputs = tuple(made(spec.shape_per_row, spec.dtype) for spec in model.inputs)
    return Rows(inputs, made(model.targets[0].shape_per_row, torch.int64))


def prediction_width(model: Layered) -> int:
    """How many classes, or words, the model tells apart."""
    return model.stage(model.num_layers - 1, model.num_layers).inputs[0].shape_per_row[-1]


def mean_loss(predictions: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, averaged over rows (and over the words of each)."""
    return nn.functional.cross_entropy(predictions.flatten(0, -2), labels.flatten())


def plain_loop(module: nn.Module, rows: Rows) -> Step:
    """The ordinary loop over a module that returns predictions."""
    optimizer = make_optimizer(module.parameters())

    def step(number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad(set_to_none=True)
            mean_loss(module(*rows.inputs), rows.labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return step


def data_parallel(model: Layered, rows: Rows, world: World) -> Step:
    """torch DDP over all workers; it listens to its parameters' gradients, so the model is its own from here on.

    All have the same weights already, which DDP would send once before the first step otherwise. Batch norms keep the
    statistics of their own rows, as ours do, where DDP would send those of the first worker in every step.
    """
    own = model.model.to(world.device)
    module = nn.parallel.DistributedDataParallel(
        own, process_group=world.everyone, gradient_as_bucket_view=True, init_sync=False, broadcast_buffers=False
    )
    return plain_loop(module, rows.part(world.worker, world.size))


def each_alone(model: Layered, rows: Rows, world: World) -> Step:
    """The ordinary loop of each worker on its own rows, with nothing sent: what their devices could do."""
    return plain_loop(model.model.to(world.device), rows.part(world.worker, world.size))


class OneTensor(nn.Module):
    """A stage that passes a single tensor on as itself, as pipelining wants it."""

    def __init__(self, stage: StageModule) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = self.stage(*tensors)
        return made[0] if len(made) == 1 else made


def pipelining(model: Layered, rows: Rows, world: World, cuts: Sequence[int], num_microbatches: int) -> Step:
    """torch.distributed.pipelining's 1F1B: worker s · replicas + r is replica r of stage s."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    edges = (0, *cuts, model.num_layers - 1)  # the loss is the schedule's own
    num_stages = len(edges) - 1
    replicas = world.size // num_stages
    stage, replica = divmod(world.worker, replicas)
    layers = model.stage(edges[stage], edges[stage + 1])
    own = OneTensor(layers)
    module, group = grouped(own, world, num_stages, replicas)
    pipe = PipelineStage(module, stage, num_stages, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(pipe, num_microbatches, loss_fn=mean_loss)
    optimizer, share = make_optimizer(own.parameters()), rows.part(replica, replicas)

    def step(number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad(set_to_none=True)
            labels = share.labels if stage == num_stages - 1 else None
            schedule.step(*(share.inputs if stage == 0 else ()), target=labels)
            optimizer.step()

    return step


def grouped(own: nn.Module, world: World, num_stages: int, replicas: int) -> tuple[nn.Module, dist.ProcessGroup | None]:
    """The stage wrapped for its replicas, and the group of the stages along one replica."""
    if replicas == 1:
        return own, None
    along = [world.group("pipe", tuple(range(replica, world.size, replicas))) for replica in range(replicas)]
    across = [
        world.group("replicas", tuple(range(stage * replicas, (stage + 1) * replicas))) for stage in range(num_stages)
    ]
    stage, replica = divmod(world.worker, replicas)
    # Without the search for unused parameters DDP orders its buckets anew after the first step, which fails for several
    # microbatches ("rebuilt parameter indices size is not same as original").
    wrapped = nn.parallel.DistributedDataParallel(
        own, process_group=across[stage], gradient_as_bucket_view=True, find_unused_parameters=True,
        init_sync=False,
    )  # fmt: skip
    return wrapped, along[replica]
