"""Models made of random parts, for `benchmarks/adversary.py`: each part is something that real models do."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from stagewright.models import Layered, cross_entropy_sum, make_layered, mean_loss

WIDTH, CLASSES = 6, 4
Tensors = tuple[Tensor, ...]


class Reversal(torch.autograd.Function):
    """The same numbers forward, and their gradient the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradient, None


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mul(4).round().div(4)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def doubled(module: nn.Module, gradients: Any, _: Any) -> Any:
    """A backward hook that doubles the gradient of a module's input, if there is one."""
    return tuple(None if each is None else each * 2 for each in gradients)


class Seen(nn.Module):
    """Counts its calls in a buffer, and adds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x


class Odd(nn.Module):
    """A chain of random parts; each method `part_…` is one, with modules of its own by its number."""

    def __init__(self, parts: tuple[str, ...], outputs: int) -> None:
        super().__init__()
        self.parts, self.num_outputs = parts, outputs
        self.counted = 0
        self.body = nn.ModuleList(self.modules_of(part) for part in parts)
        linears = [
            each for group in self.body for each in group if type(each) is nn.Linear and each.in_features == WIDTH
        ]
        for part, group in zip(parts, self.body):
            if part == "tied" and len(linears) > 1:
                group[0].weight = linears[0].weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("shift", torch.linspace(-0.5, 0.5, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def modules_of(self, part: str) -> nn.ModuleList:
        """What a part needs."""
        wide = lambda: nn.Linear(WIDTH, WIDTH)  # noqa: E731
        made: dict[str, Callable[[], list[nn.Module]]] = {
            "norm": lambda: [nn.LayerNorm(WIDTH), wide()],
            "batch_norm": lambda: [nn.BatchNorm1d(WIDTH), wide()],
            "dropout": lambda: [nn.Dropout(0.3), wide()],
            "channel_dropout": lambda: [nn.Dropout1d(0.4), wide()],
            "siamese": lambda: [nn.Linear(WIDTH // 2, WIDTH)],
            "attention": lambda: [nn.MultiheadAttention(2, 1, batch_first=True), wide()],
            "convolution": lambda: [nn.Conv1d(1, 2, 3, padding=1), nn.Linear(2 * WIDTH, WIDTH)],
            "hooked": lambda: [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())],
            "encoder": lambda: [nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True)],
            "seen": lambda: [Seen(), wide()],
            "frozen": lambda: [wide(), wide()],
        }
        group = nn.ModuleList(made.get(part, lambda: [wide()])())
        if part == "hooked":
            group[0].register_full_backward_hook(doubled)
        if part == "heard":
            group[0].weight.register_hook(lambda gradient: gradient * 3)
        if part == "clamped":
            group[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        if part == "frozen":
            group[0].requires_grad_(False)
        return group

    def forward(self, x: Tensor, scale: Tensor) -> Any:
        kept = h = x
        for part, group in zip(self.parts, self.body):
            if part == "keep":
                kept = h
            h = getattr(self, f"part_{part}")(h, group, scale, kept)
        logits = self.head(h)
        return {"logits": logits, "extra": h * 0.1} if self.num_outputs == 2 else logits

    def part_linear(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return torch.tanh(group[0](h))

    part_keep = part_tied = part_heard = part_clamped = part_linear

    def part_twice(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return torch.tanh(group[0](torch.tanh(group[0](h))))

    def part_residual(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return h + torch.tanh(group[0](h))

    def part_skip(self, h: Tensor, group: Any, scale: Tensor, kept: Tensor) -> Tensor:
        return torch.tanh(group[0](h)) + kept

    def part_scaled(self, h: Tensor, group: Any, scale: Tensor, kept: Tensor) -> Tensor:
        return torch.tanh(group[0](h)) * scale

    def part_norm(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return group[1](group[0](h))

    part_batch_norm = part_dropout = part_seen = part_norm

    def part_channel_dropout(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return group[1](group[0](h.unflatten(1, (3, 2))).flatten(1))

    def part_functional_dropout(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return group[0](F.dropout(h, 0.2, self.training))

    def part_no_grad(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        with torch.no_grad():
            made = torch.tanh(group[0](h))
        return h + made

    def part_inference(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        with torch.inference_mode():
            made = torch.tanh(group[0](h))
        return h + made.clone()

    def part_full_precision(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(group[0](h))

    def part_reversed(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return Reversal.apply(torch.tanh(group[0](h)), 0.5)

    def part_rounded(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return Rounded.apply(torch.tanh(group[0](h)))

    def part_hooked(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return group[0](h)

    def part_in_place(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        made = group[0](h).mul_(0.5)
        made[:, 0] += 1.0
        return F.relu(made, inplace=True) + h

    def part_buffer(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return torch.tanh(group[0](h + self.shift))

    def part_frozen(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return torch.tanh(group[1](group[0](h)))

    def part_detached(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return h + torch.tanh(group[0](h)).detach()

    def part_chosen(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return h + group[0](h).argmax(dim=-1, keepdim=True) * 0.1

    def part_masked(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        weights = torch.softmax(group[0](h).masked_fill(h > 1.0, float("-inf")), -1)
        return h * torch.nan_to_num(weights)

    def part_siamese(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        left, right = (torch.tanh(group[0](half)) for half in h.chunk(2, dim=-1))
        return left * right + h

    def part_attention(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        words = h.unflatten(1, (3, 2))
        return group[1]((words + group[0](words, words, words, need_weights=False)[0]).flatten(1))

    def part_encoder(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return group[0](group[0](h.unflatten(1, (3, 2)))).flatten(1)

    def part_convolution(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return torch.tanh(group[1](group[0](h[:, None]).flatten(1)))

    def part_sizes(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        rows, width = h.shape
        return torch.tanh(group[0](h.reshape(rows * 1, width)).view(rows, width))

    def part_exported(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        if h.size(1) != WIDTH:
            raise ValueError(h.shape)
        return torch.tanh(group[0](h))

    def part_trains(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        h = torch.tanh(group[0](h))
        return h * 1.5 if self.training else h

    def part_centred(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return torch.tanh(group[0](h - h.mean(0)))

    # What has to be refused

    def part_random(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return group[0](h) * (1.0 + random.random())

    def part_counted(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        self.counted += 1
        return group[0](h) * (1.0 + 0.1 * self.counted)

    def part_branching(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return group[0](h) if h.sum() > 0 else h

    def part_layer_drop(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        return torch.tanh(group[0](h)) if torch.rand([]) < 0.5 else h

    def part_listening(self, h: Tensor, group: Any, *_: Tensor) -> Tensor:
        made = group[0](h)
        if made.requires_grad:
            made.register_hook(lambda gradient: gradient * 2)
        return made


EXACT = (
    "linear", "twice", "tied", "residual", "keep", "skip", "scaled", "norm", "dropout", "channel_dropout",
    "functional_dropout", "no_grad", "inference", "full_precision", "reversed", "rounded", "hooked", "heard",
    "in_place", "buffer", "frozen", "detached", "chosen", "masked", "siamese", "attention", "encoder", "convolution",
    "sizes", "exported", "trains",
)  # fmt: skip
MIXING = ("batch_norm", "centred", "seen", "clamped")
"""Parts whose result depends on how a batch is divided."""
REFUSED = ("random", "counted", "branching", "layer_drop", "listening")


@dataclass(frozen=True)
class OddModel:
    """A random model, its loss, and the rows of its batches."""

    seed: int
    parts: tuple[str, ...]
    outputs: int
    loss: Any
    mean: Callable[..., Tensor]
    ignores: bool

    @property
    def drops(self) -> bool:
        """Whether anything is dropped at random."""
        return any("dropout" in part for part in self.parts)

    def build(self) -> nn.Module:
        """The model, with the same weights every time."""
        torch.manual_seed(self.seed)
        return Odd(self.parts, self.outputs).double()

    def layered(self) -> Layered:
        """The model as layers, with its loss."""
        inputs, targets = self.rows(0, 2, None)
        return make_layered(self.build(), inputs, loss=self.loss, targets=targets)

    def rows(self, batch: int, number: int, overflow_at: int | None) -> tuple[Tensors, Tensors]:
        """The inputs and targets of a batch; infinite in one of them, where asked for."""
        generator = torch.Generator().manual_seed(1000 * self.seed + batch)
        x, scale = torch.randn(number, WIDTH, generator=generator), torch.rand(number, 1, generator=generator) + 0.5
        labels = torch.randint(CLASSES, (number,), generator=generator)
        if self.ignores and number > 2:
            labels[torch.rand(number, generator=generator) < 0.4] = -100
            labels[-1] = 0
        factor = float("inf") if batch == overflow_at else 1.0
        return (x.double() * factor, scale.double()), (labels,)


def draw_model(seed: int) -> OddModel:
    """The model of a seed."""
    draw = random.Random(seed * 31 + 5)
    parts = [draw.choice(EXACT) for _ in range(draw.randint(2, 6))]
    if draw.random() < 0.15:
        parts[draw.randrange(len(parts))] = draw.choice(MIXING)
    if draw.random() < 0.05:
        parts[draw.randrange(len(parts))] = draw.choice(REFUSED)
    outputs, kind = draw.choice((1, 1, 2)), draw.choice(("sum", "mean", "ignoring", "squares"))
    loss, mean = losses(kind, outputs)
    return OddModel(seed, tuple(parts), outputs, loss, mean, kind == "ignoring")


def losses(kind: str, outputs: int) -> tuple[Any, Callable[..., Tensor]]:
    """A loss as the library takes it, and the same as a plain mean over the batch."""
    extra = outputs == 2

    def plain(made: Any, labels: Tensor) -> Tensor:
        logits = made["logits"] if extra else made
        if kind == "squares":
            mean = (logits - F.one_hot(labels, CLASSES)).square().sum(1).mean()
        else:
            mean = F.cross_entropy(logits, labels)
        counted = labels.ne(-100).sum() if kind == "ignoring" else len(labels)
        return mean + made["extra"].square().sum() / counted if extra else mean

    def summed(logits: Tensor, *others: Tensor) -> Tensor:
        *extras, labels = others
        total = (
            (logits - F.one_hot(labels, CLASSES)).square().sum()
            if kind == "squares"
            else F.cross_entropy(logits, labels, reduction="sum")
        )
        return total + sum(each.square().sum() for each in extras)

    if kind == "ignoring":
        return CountedSum(summed), plain
    if kind == "mean" and not extra:
        return mean_loss(F.cross_entropy), plain
    return (cross_entropy_sum() if kind == "sum" and not extra else summed), plain


@dataclass(frozen=True)
class CountedSum:
    """A sum over the labels that count."""

    total: Callable[..., Tensor]

    def __call__(self, *given: Tensor) -> Tensor:
        return self.total(*given)

    def count(self, labels: Tensor) -> Tensor:
        return labels.ne(-100).sum()


# Dropout of a plain loop


def mixed(numbers: np.ndarray) -> np.ndarray:
    """murmur3's finalizer, after a product with the golden ratio."""
    numbers = numbers.astype(np.uint32)
    with np.errstate(over="ignore"):
        numbers = numbers * np.uint32(0x9E3779B9) ^ numbers >> np.uint32(16)
        numbers = numbers * np.uint32(0x85EBCA6B)
        numbers = (numbers ^ numbers >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return numbers ^ numbers >> np.uint32(16)


class dropped_by_number(TorchFunctionMode):  # noqa: N801
    """Dropout by seed, batch, row, place and position; the place is the module that draws, and how often it did."""

    def __init__(self, model: nn.Module, seed: int, batch: int, rows: int) -> None:
        super().__init__()
        self.keys = mixed(mixed(np.arange(rows) ^ key(seed)) ^ key(batch))
        self.inside, self.draws = [""], Counter[str]()
        self.hooks = [
            each.register_forward_pre_hook(lambda *_, path=path: self.inside.append(path), prepend=True)
            for path, each in model.named_modules()
        ]
        self.hooks += [each.register_forward_hook(self.leave) for each in model.modules()]

    def leave(self, *_: Any) -> None:
        self.inside.pop()

    def __exit__(self, *fault: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        super().__exit__(*fault)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (F.dropout, F.dropout1d):
            return func(*args, **(kwargs or {}))
        given = (*args, *(kwargs or {}).values())
        x, rate = given[0], given[1]
        if not rate:
            return x
        shape = x.shape if func is F.dropout else (*x.shape[:2], 1)
        return x * (self.kept(shape, rate).to(x) / (1 - rate))

    def kept(self, shape: Any, rate: float) -> Tensor:
        width, path = torch.Size(shape).numel() // len(self.keys), self.inside[-1]
        place = key(zlib.crc32(path.encode()) + 64 * self.draws[path])
        self.draws[path] += 1
        drawn = mixed(self.keys[:, None] ^ mixed(np.arange(width) ^ place)[None]).astype(np.int32)
        return torch.from_numpy(drawn).view(*shape) >= int((rate - 0.5) * 2**32)


def key(number: int) -> np.ndarray:
    return mixed(np.array([number & 0x7FFFFFFF]))
