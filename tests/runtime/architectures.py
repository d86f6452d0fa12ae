"""Twelve architectures of transformers in small, trained by real workers: `python -m tests.runtime.architectures`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.cluster import parse_placement
from stagewright.models import Layered, build_model
from stagewright.plan import Plan, Stage
from stagewright.runtime.feed import FunctionFeed
from stagewright.runtime.settings import Settings
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, open_world
from stagewright.scheduling import make_schedule

LENGTH, WORDS, ROWS, STEPS = 10, 96, 10, 5
PLACEMENTS = {"1-1": "0:0.0:1", "3-1": "0:0-2.0:3", "2-1-1": "0:0-1.0:2.0:3"}
DENSE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 32,
}  # fmt: skip
GROUPED = {**DENSE, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Architecture:
    """A configuration of transformers, with its own defaults but for sizes, and what it takes."""

    kind: str
    sizes: dict[str, Any]
    task: str = "CausalLM"
    inputs: tuple[str, ...] = ("input_ids",)
    no_dropout: dict[str, Any] = field(default_factory=dict)
    plainly: dict[str, Any] = field(default_factory=dict)
    """What transformers' own model needs to compute in fp64."""
    tolerance: float = 1e-9

    def mean(self, model: Any, number: int) -> Tensor:
        """The loss of a batch by transformers' own model, which itself would round its logits to single precision."""
        inputs, (labels,) = self.batch(number)
        logits = model(**dict(zip(self.inputs, inputs))).logits
        if self.task == "CausalLM":
            logits, labels = logits[:, :-1], labels[:, 1:]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def folder(self, where: Path) -> Path:
        """Saves a model with weights drawn by transformers, as it would be found."""
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(self.kind, vocab_size=WORDS, **self.sizes, **self.no_dropout)
        getattr(transformers, f"AutoModelFor{self.task}").from_config(config).save_pretrained(where)
        return where

    def batch(self, number: int) -> tuple[list[Tensor], list[Tensor]]:
        """The inputs and labels of a batch; rows count different numbers of tokens."""
        generator = torch.Generator().manual_seed(100 + number)
        tokens = torch.randint(3, WORDS, (ROWS, LENGTH), generator=generator)
        labels = torch.randint(3, WORDS, (ROWS, LENGTH), generator=generator)
        counted = torch.randint(1, LENGTH, (ROWS, 1), generator=generator)
        labels[torch.arange(LENGTH) > counted] = -100
        mask = (torch.arange(LENGTH) <= counted.flip(0)).long()
        given = {"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": tokens.roll(1, 1)}
        return [given[name] for name in self.inputs], [labels]


_MASKED = ("input_ids", "attention_mask")
ARCHITECTURES = {
    "gpt2": Architecture(
        "gpt2", {"n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
        no_dropout={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "llama": Architecture("llama", GROUPED),
    "qwen2": Architecture("qwen2", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": Architecture("qwen3", {**GROUPED, "head_dim": 8}),
    # Its norms round the gradient of their weights to single precision, for each microbatch by itself.
    "gemma": Architecture("gemma", {**GROUPED, "head_dim": 8}, tolerance=1e-6),
    "mistral": Architecture("mistral", {**GROUPED, "sliding_window": 4}),
    "phi": Architecture("phi", DENSE, no_dropout={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}),
    "olmo": Architecture("olmo", {**DENSE, "eos_token_id": 2}),
    "opt": Architecture(
        "opt", {
            "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 3,
            "num_attention_heads": 4, "max_position_embeddings": 32,
        },
        no_dropout={"dropout": 0.0},
    ),
    "bert": Architecture(
        "bert", DENSE, "MaskedLM", _MASKED,
        no_dropout={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "t5": Architecture(
        "t5", {
            "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
        },
        "Seq2SeqLM", (*_MASKED, "decoder_input_ids"), no_dropout={"dropout_rate": 0.0},
    ),
    "mixtral": Architecture(
        "mixtral", {**GROUPED, "num_local_experts": 4}, plainly={"experts_implementation": "eager"}
    ),
}  # fmt: skip


def make_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def train_plainly(folder: Path, about: Architecture) -> tuple[list[float], dict[str, Tensor]]:
    """What a loop over transformers' own model comes to: losses, and the weights."""
    import transformers

    auto = getattr(transformers, f"AutoModelFor{about.task}")
    model = auto.from_pretrained(folder, dtype=torch.float32, **about.plainly).double().train()
    optimizer, losses = make_adamw(model.parameters()), []
    for number in range(STEPS):
        loss = about.mean(model, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: each.detach().clone() for name, each in model.named_parameters()}


def plan_of(layered: Layered, placement: str, microbatches: int = 2) -> Plan:
    """The layers cut evenly over a placement."""
    groups, edges = parse_placement(PLACEMENTS[placement]), (0, *layered.cuts())
    starts = [edges[len(edges) * number // len(groups)] for number in range(len(groups))] + [layered.num_layers]
    stages = tuple(
        Stage(layers=layered.names[starts[n] : starts[n + 1]], devices=devices) for n, devices in enumerate(groups)
    )
    return Plan(model="hf", stages=stages, batch=ROWS, num_microbatches=microbatches)


def train_cut(folder: Path, about: Architecture, placement: str, world: World) -> float:
    """The largest relative difference of this worker's losses and weights from those of the plain loop."""
    layered = build_model(f"hf:{folder}", sequence_length=LENGTH, load=False, check=False)
    plan, settings = plan_of(layered, placement), Settings(precision="fp64", device="cpu", timeout_s=90.0)

    def rows(batch: int, start: int, stop: int) -> Any:
        return tuple([each[start:stop] for each in part] for part in about.batch(batch))

    worker = Worker(make_schedule(plan), layered, world, settings, make_optimizer=make_adamw, feed=FunctionFeed(rows))
    worker.run(STEPS)
    worker.close()
    expected = torch.load(folder / "plain.pt", weights_only=True)
    worst = 0.0
    for here in worker.replicas.values():
        for name, found in here.weights.newest().named_parameters():
            wanted = expected["weights"][here.names.get(name, name)]
            # What no gradient moves but rounding (the biases of keys) has a norm of 1e-14: there is nothing to share.
            worst = max(worst, float((found - wanted).norm() / wanted.norm().clamp(min=1e-4)))
    last = plan.workers[-1]
    if world.worker in last:
        sums = torch.stack([worker.figures(batch) for batch in range(STEPS)])
        wanted = torch.tensor(expected["losses"], dtype=torch.float64)
        worst = max(worst, float(((sums[:, 0] / sums[:, 1] - wanted) / wanted).abs().max()))
    return worst


@contextmanager
def quiet() -> Iterator[None]:
    """transformers tells how it loads on the screen, which is nobody's business here."""
    os.environ["TQDM_DISABLE"] = "1"
    yield


def main(where: str, names: str, result: str) -> None:
    """Trains the named architectures in every placement for as many workers as there are."""
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    with open_world(Settings(timeout_s=90.0, device="cpu")) as world, quiet():
        for name in names.split(","):
            for placement, devices in PLACEMENTS.items():
                if len({id for group in parse_placement(devices) for id in group}) != world.size:
                    continue
                worst = torch.tensor(train_cut(Path(where, name), ARCHITECTURES[name], placement, world))
                dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=world.control)
                found[f"{name} {placement}"] = float(worst)
        if world.worker == 0:
            Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
