"""One worker of test_batch_norm: trains a net with batch norm over several replicas, and compares with one process."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

from stagewright.cluster import parse_placement
from stagewright.models import cross_entropy_sum, make_layered
from stagewright.plan import Plan, Stage
from stagewright.runtime.batch_norm import synchronize_batch_norm
from stagewright.runtime.feed import FunctionFeed
from stagewright.runtime.settings import Settings
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, open_world
from stagewright.scheduling import make_schedule
from tests.runtime.reference import rows_of_batch

STEPS, BATCH = 4, 23


def net() -> nn.Sequential:
    """A net with two batch norms, the same every time."""
    torch.manual_seed(3)
    widths = (6, 8, 8)
    layers = [[nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()] for a, b in zip(widths, widths[1:])]
    return nn.Sequential(*(each for group in layers for each in group), nn.Linear(8, 5)).double()


def sgd(parameters: object) -> torch.optim.Optimizer:
    """The optimizer of both."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


def train_alone() -> nn.Sequential:
    """The plain loop over whole batches."""
    module = net()
    optimizer = sgd(module.parameters())
    for batch in range(STEPS):
        inputs, labels = rows_of_batch(batch, BATCH)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(inputs), labels).backward()
        optimizer.step()
    return module


def far_from_zero(world: World) -> float:
    """How far single precision is from double where means are large and variances small, beside torch's own norm."""
    torch.manual_seed(5)
    rows = torch.randn(24, 3) * 0.1 + torch.tensor([0.0, 100.0, 1000.0])
    norm, alone = (nn.BatchNorm1d(3) for _ in range(2))
    whole = nn.BatchNorm1d(3).double()(rows.double())
    synchronize_batch_norm(norm, dist.group.WORLD)
    mine = rows.tensor_split(world.size)[world.worker]
    first = sum(len(part) for part in rows.tensor_split(world.size)[: world.worker])
    ours = (norm(mine).double() - whole[first : first + len(mine)]).abs().max()
    theirs = (alone(rows).double() - whole).abs().max()
    return float(ours / theirs)


def main(placement: str, policy: str) -> None:
    """Trains in stages with batch norm over all replicas; the largest relative difference is printed."""
    torch.set_num_threads(1)
    sample = (torch.zeros(2, 6, dtype=torch.float64),)
    model = make_layered(net(), sample, loss=cross_entropy_sum(), targets=(torch.zeros(2, dtype=torch.long),))
    groups = parse_placement(placement)
    edges = [model.num_layers * number // len(groups) for number in range(len(groups) + 1)]
    stages = tuple(
        Stage(layers=model.names[edges[n] : edges[n + 1]], devices=devices) for n, devices in enumerate(groups)
    )
    plan = Plan(model="net", stages=stages, batch=BATCH, policy=policy)  # type: ignore[arg-type]

    def rows(batch: int, start: int, stop: int) -> tuple[tuple[torch.Tensor], tuple[torch.Tensor]]:
        inputs, labels = rows_of_batch(batch, BATCH)
        return (inputs[start:stop],), (labels[start:stop],)

    settings = Settings(precision="fp64", sync_batch_norm=True, timeout_s=60.0)
    with open_world(settings) as world:
        worker = Worker(make_schedule(plan), model, world, settings, make_optimizer=sgd, feed=FunctionFeed(rows))
        worker.run(STEPS)
        worker.close()
        expected, worst = train_alone().state_dict(), torch.zeros(1, dtype=torch.float64)
        for module in worker.current_modules():
            for name, value in module.state_dict().items():
                whole = expected[name].double()
                worst = torch.maximum(worst, ((value - whole).norm() / whole.norm()).reshape(1))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        ratio = torch.tensor([far_from_zero(world)], dtype=torch.float64)
        dist.all_reduce(ratio, op=dist.ReduceOp.MAX)
        if world.worker == 0:
            print(f"far from zero {ratio.item():.3e}", flush=True)
            print(f"worst {worst.item():.3e}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
