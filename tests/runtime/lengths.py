"""Rows whose length changes with every batch, under several plans: `python -m tests.runtime.lengths RESULTS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import stagewright as sw
from stagewright.models.loss import token_cross_entropy_sum
from stagewright.runtime.evaluate import evaluate
from stagewright.runtime.settings import Settings
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, open_world
from tests.runtime.reference import train_plainly

LENGTHS, WORDS, WIDTH, BATCH, STEPS = (6, 9, 12), 11, 8, 7, 5


class Attending(nn.Module):
    """Two layers of causal attention; torch.export writes the length of a row down in its graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTHS[-1], WIDTH)
        self.mixing = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.ones(1) * 0.5)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.size(1) > LENGTHS[-1]:  # a branch on sizes, which torch.fx does not trace
            raise ValueError("too long")
        length = tokens.size(1)
        hidden = self.words(tokens) + self.places(torch.arange(length)) * self.scale
        mask = torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)
        for mixing, norm in zip(self.mixing, self.norms):
            query, key, value = mixing(norm(hidden)).chunk(3, dim=-1)
            hidden = hidden + torch.softmax(query @ key.transpose(1, 2) + mask, -1) @ value.reshape(-1, length, WIDTH)
        return self.head(hidden)


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, of which some do not count: unevenly many of each row."""
    drawn = torch.Generator().manual_seed(number)
    tokens = torch.randint(WORDS, (BATCH, length(number)), generator=drawn)
    counted = torch.rand(tokens.shape, generator=drawn) < torch.linspace(0, 1, BATCH)[:, None]
    return tokens, torch.randint(WORDS, tokens.shape, generator=drawn).where(counted, -100)


def length(number: int) -> int:
    return LENGTHS[number % len(LENGTHS)]


class Changing:
    """A feed whose rows are longer and shorter."""

    lengths = LENGTHS

    def length(self, batch: int) -> int:
        return length(batch)

    def inputs(self, batch: int, start: int, stop: int) -> list[Tensor]:
        return [batch_of(batch)[0][start:stop]]

    def targets(self, batch: int, start: int, stop: int) -> list[Tensor]:
        return [batch_of(batch)[1][start:stop]]


PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "2-1": ("0:0-1.0:2", {"num_microbatches": 3}),
    "2-1 dynamic": ("0:0-1.0:2", {"num_microbatches": 3, "policy": "dynamic"}),
    "1-2 zero-bubble": ("0:0.0:1-2", {"num_microbatches": 3, "policy": "zero-bubble", "route": "rotate"}),
    "1-1-1 ssp": ("0:0.0:1.0:2", {}),
    "2-1 recomputed": ("0:0-1.0:2", {"num_microbatches": 2}),
}


def make_plan(layered: sw.Layered, name: str) -> sw.Plan:
    placement, options = PLANS[name]
    groups = [sw.parse_devices(each) for each in placement.split(".")]
    cuts = layered.cuts()
    edges = [0, *(cuts[len(cuts) * number // len(groups)] for number in range(1, len(groups))), layered.num_layers]
    versions = [len(groups) - number if "ssp" in name else 1 for number in range(len(groups))]
    stages = tuple(
        sw.Stage(layers=layered.names[a:b], devices=group, versions=kept, recompute="recomputed" in name)
        for a, b, group, kept in zip(edges, edges[1:], groups, versions)
    )
    return sw.Plan(model="own", stages=stages, batch=BATCH, **options)


def run(name: str, world: World) -> float:
    """The largest difference of losses, weights and an evaluation from those of a plain loop."""
    sample = torch.zeros(2, LENGTHS[-1], dtype=torch.int64)
    layered = sw.make_layered(Attending(), (sample,), loss=token_cross_entropy_sum(), targets=(sample,))
    plan = make_plan(layered, name)
    worker = Worker(
        sw.make_schedule(plan), layered, world, Settings(precision="fp64", timeout_s=60),
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), feed=Changing(),
    )  # fmt: skip
    worker.run(STEPS)
    sums = torch.stack([worker.figures(batch) for batch in range(STEPS)])
    dist.all_reduce(sums)
    loss = evaluate(worker, Changing(), 2 * BATCH, BATCH)[0].item()
    worker.close()
    plain = Attending()
    kept = {}
    for stage, versions in enumerate(plan.versions):
        edge = sum(len(each.layers) for each in plan.stages[:stage])
        for each in layered.parameter_names(edge, edge + len(plan.stages[stage].layers)):
            kept[each] = max(kept.get(each, 1), versions)
    losses, weights = train_plainly(
        plain, lambda batch: mean_loss(plain, batch), STEPS, kept,
        lambda parameters: torch.optim.SGD(parameters, 0.1, 0.9),
    )  # fmt: skip
    plain.load_state_dict(weights, strict=False)
    tokens = [mean_loss(plain, batch, "sum") for batch in range(2)]
    counted = sum(int(batch_of(batch)[1].ne(-100).sum()) for batch in range(2))
    gaps = [
        abs(loss - float(sum(tokens)) / counted),
        float((sums[:, 0] / sums[:, 1] - torch.tensor(losses)).abs().max()),
    ]
    for here in worker.replicas.values():
        found = here.weights.newest().named_parameters()
        gaps += [float((each - weights[here.names.get(own, own)]).abs().max()) for own, each in found]
    return max(gaps)


def mean_loss(model: nn.Module, batch: int, reduction: str = "mean") -> Tensor:
    tokens, labels = batch_of(batch)
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction=reduction)


def main(results: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    with open_world(Settings(timeout_s=60)) as world:
        for name in PLANS:
            worst = torch.tensor([run(name, world)])
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            if world.worker == 0:
                with Path(results).open("a") as file:
                    file.write(json.dumps([name, worst.item()]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
