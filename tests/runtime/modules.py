"""Models that are easy to get wrong, with the rows of their batches: every plan trains them as a plain loop does."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from stagewright.models import Layered, cross_entropy_sum, make_layered, mean_loss, token_cross_entropy_sum
from stagewright.models.lora import Lora
from tests.runtime.reference import Tower, rows_of_batch

WIDTH, CLASSES = 6, 4
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
Tensors = tuple[Tensor, ...]


class Tail(nn.Sequential):
    """What comes after the part that is tested, so that there is something to cut off."""

    def __init__(self) -> None:
        hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
        super().__init__(*hidden, nn.Linear(WIDTH, CLASSES))


class Reused(nn.Module):
    """A linear layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.tail = nn.Linear(WIDTH, WIDTH), Tail()

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(torch.tanh(self.a(torch.tanh(self.a(x)))))


class Siamese(nn.Module):
    """Both halves of a row go through one encoder, and two layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.first, self.second = nn.Linear(WIDTH // 2, WIDTH), nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 6)
        self.second.weight = self.first.weight
        self.tail = Tail()

    def forward(self, x: Tensor) -> Tensor:
        left, right = (torch.tanh(self.encoder(half)) for half in x.chunk(2, dim=-1))
        return self.tail(self.second(torch.tanh(self.first(left))) * right)


class AppliedTwice(nn.Module):
    """A transformer layer that is applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        self.tail = Tail()

    def forward(self, x: Tensor) -> Tensor:
        words = torch.stack([x, x.flip(-1), x * x], dim=1)
        return self.tail(self.layer(self.layer(words)).mean(dim=1))


class Partly(nn.Module):
    """Parameters to which no gradient comes: one is not used, one only to choose, one behind a detach."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.choosing = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.cut_off, self.tail = nn.Linear(WIDTH, WIDTH), Tail()

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.choosing(x).argmax(dim=-1, keepdim=True)
        return self.tail(self.first(x) + chosen + self.cut_off(x).detach())


class Quiet(nn.Module):
    """A backbone without gradient, by a context that a trace does not see; torch.export is needed where it branches."""

    def __init__(self, context: Callable[[], Any], branches: bool) -> None:
        super().__init__()
        self.backbone, self.tail = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), Tail()
        self.context, self.branches = context, branches

    def forward(self, x: Tensor) -> Tensor:
        if self.branches and x.size(1) != WIDTH:
            raise ValueError(x.shape)
        with self.context():
            h = self.backbone(x)
        return self.tail(h.clone() * x)


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
    """A straight-through estimator: rounding, whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mul(4).round().div(4)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Own(nn.Module):
    """Functions with a backward of their own."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.first, self.second, self.tail = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Tail()
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        if self.branches and x.size(1) != WIDTH:
            raise ValueError(x.shape)
        h = Reversal.apply(self.first(x), 0.5)
        return self.tail(Rounded.apply(torch.tanh(self.second(h))) + h)


class Hooked(nn.Module):
    """A container whose backward hook doubles a gradient, and a weight with a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tail = nn.Linear(WIDTH, WIDTH), Tail()
        self.heard = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.heard.register_full_backward_hook(lambda module, gradients, _: (gradients[0] * 2,))
        self.first.weight.register_hook(lambda gradient: gradient * 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.heard(self.first(x)))


class ChainOfItsOwn(nn.Sequential):
    """A sequential container that does more than call its children in turn."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Dropped(nn.Module):
    """Dropout as a module, of whole channels, and rows dropped by numbers that forward draws itself."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.first, self.tail, self.branches = (
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Dropout(0.3)),
            Tail(),
            branches,
        )
        self.channels, self.second = nn.Dropout1d(0.4), nn.Linear(2 * WIDTH, WIDTH)
        self.end = nn.Sequential(nn.AlphaDropout(0.2), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.branches and x.size(1) != WIDTH:
            raise ValueError(x.shape)
        h = self.channels(self.first(x).unflatten(1, (WIDTH, 2))).flatten(1)
        return self.tail(self.end(torch.tanh(self.second(h))))


class ByNumber(TorchFunctionMode):
    """Dropout of a plain loop, number by number: seed, batch, row, place and position say what is kept."""

    def __init__(self, batch: int, rows: int, seed: int = 0) -> None:
        super().__init__()
        self.batch, self.rows, self.seed = batch, rows, seed
        self.places = iter(("first.1", "channels", "end.0"))
        """The modules of `Dropped` that draw, in order."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x, p = (*args, None, None)[:2]
        p = (kwargs or {}).get("p", p)
        if func in (F.dropout, F.dropout1d, F.alpha_dropout) and not p:
            return x
        if func is F.dropout:
            return x * (self.kept(x.shape, p).to(x) / (1 - p))
        if func is F.dropout1d:
            return x * (self.kept((*x.shape[:2], 1), p).to(x) / (1 - p))
        if func is F.alpha_dropout:
            keep, alpha = self.kept(x.shape, p), -1.7580993408473766
            scale = ((1 - p) * (1 + p * alpha**2)) ** -0.5
            return torch.where(keep, x, alpha) * scale - scale * alpha * p
        return func(*args, **(kwargs or {}))

    def kept(self, shape: Any, p: float) -> Tensor:
        place = mixed(zlib.crc32(next(self.places).encode()) & 0x7FFFFFFF)
        keys = [mixed(mixed(row ^ mixed(self.seed)) ^ mixed(self.batch)) for row in range(self.rows)]
        width = torch.Size(shape).numel() // self.rows
        drawn = [[mixed(key ^ mixed(number ^ place)) for number in range(width)] for key in keys]
        signed = torch.tensor([[each - 2**32 * (each >= 2**31) for each in row] for row in drawn])
        return signed.view(shape) >= int((p - 0.5) * 2**32)


def mixed(number: int) -> int:
    """murmur3's finalizer, after a product with the golden ratio."""
    number = (number * 0x9E3779B9 ^ number >> 16) & 0xFFFFFFFF
    number = number * 0x85EBCA6B & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16


class Normed(nn.Module):
    """Batch norm in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(3))
        )
        self.tail = Tail()

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.body(x))


class Words(nn.Module):
    """Four tokens a row, of which some do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.tail = nn.Embedding(9, WIDTH), Tail()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tail(self.words(tokens))


class TiedWords(nn.Module):
    """Two small layers between an embedding and a head that share a weight, and a second pair that does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embed = nn.Embedding(9, WIDTH)
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embed.weight
        self.d.weight = self.a.weight

    def forward(self, words: Tensor) -> Tensor:
        h = self.embed(words)
        for layer in (self.a, self.b, self.c, self.d):
            h = h + torch.tanh(layer(h))
        return self.head(self.norm(h))


def adapted() -> nn.Module:
    """Adapters in two layers; what is tied is frozen, and whole stages are."""
    return Lora(rank=2, targets=("b", "d"), alpha=3.0)(TiedWords())


def tokens(batch: int, num_rows: int) -> tuple[Tensors, Tensors]:
    """Tokens and labels; some labels are -100, all of row 1's."""
    generator = torch.Generator().manual_seed(1000 + batch)
    chosen = torch.randint(9, (num_rows, 4), generator=generator)
    labels = torch.randint(CLASSES, (num_rows, 4), generator=generator)
    labels[torch.rand(num_rows, 4, generator=generator) < 0.4] = -100
    labels[1:2] = -100
    return (chosen,), (labels,)


def mean_of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss that everybody expects of tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def number_of_tokens(labels: Tensor) -> Tensor:
    return (labels != -100).sum()


@dataclass(frozen=True)
class Model:
    """How to build a model, its loss, and the rows of its batches."""

    build: Callable[[], nn.Module]
    rows: Callable[[int, int], tuple[Tensors, Tensors]]
    loss: Any
    mean: Callable[..., Tensor]
    """The loss of a plain loop: the mean over the batch."""
    mixes_rows: bool = False
    """Whether rows of a microbatch see one another."""
    drops: bool = False
    """Whether it has dropout, which a plain loop draws as `ByNumber` says."""

    def make(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The model with the same weights every time."""
        torch.manual_seed(0)
        return self.build().to(dtype)

    def layered(self, dtype: torch.dtype = torch.float64) -> Layered:
        """The model as layers, with its loss."""
        inputs, targets = self.rows(0, 2)
        inputs = tuple(each.to(dtype) if each.is_floating_point() else each for each in inputs)
        return make_layered(self.make(dtype), inputs, loss=self.loss, targets=targets)


def classified(batch: int, num_rows: int) -> tuple[Tensors, Tensors]:
    """The inputs and labels of a batch."""
    inputs, labels = rows_of_batch(batch, num_rows)
    return (inputs,), (labels,)


def classifier(build: Callable[[], nn.Module]) -> Model:
    """A model of rows of numbers and their labels."""
    return Model(build, classified, cross_entropy_sum(), F.cross_entropy)


MODELS = {
    "tower": classifier(Tower),
    "reused": classifier(Reused),
    "siamese": classifier(Siamese),
    "applied twice": classifier(AppliedTwice),
    "partly": classifier(Partly),
    "no_grad": classifier(lambda: Quiet(torch.no_grad, False)),
    "no_grad, exported": classifier(lambda: Quiet(torch.no_grad, True)),
    "inference_mode": classifier(lambda: Quiet(torch.inference_mode, False)),
    "own functions": classifier(lambda: Own(False)),
    "own functions, exported": classifier(lambda: Own(True)),
    "hooked": classifier(Hooked),
    "own chain": classifier(lambda: nn.Sequential(ChainOfItsOwn(nn.Linear(WIDTH, WIDTH), nn.Tanh()), Tail())),
    "dropped": Model(lambda: Dropped(False), classified, cross_entropy_sum(), F.cross_entropy, drops=True),
    "dropped, exported": Model(lambda: Dropped(True), classified, cross_entropy_sum(), F.cross_entropy, drops=True),
    "normed": Model(Normed, classified, cross_entropy_sum(), F.cross_entropy, mixes_rows=True),
    "tied words": Model(TiedWords, tokens, token_cross_entropy_sum(), mean_of_tokens),
    "adapted": Model(adapted, tokens, token_cross_entropy_sum(), mean_of_tokens),
    "words": Model(Words, tokens, token_cross_entropy_sum(), mean_of_tokens),
    "words, own loss": Model(Words, tokens, mean_loss(mean_of_tokens, count=number_of_tokens), mean_of_tokens),
    "weighted": Model(
        Tower,
        classified,
        mean_loss(nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=2, label_smoothing=0.1)),
        nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=2, label_smoothing=0.1),
    ),
}
