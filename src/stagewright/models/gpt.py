"""GPT-2: token and position embeddings, blocks of attention and MLP, and a head over the vocabulary.

embed │ block0 │ block1 │ … │ head │ loss
  └────── one weight, if tied ──┘         a tied model is cut like any other
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stagewright.errors import ModelError
from stagewright.models.recipe import Recipe, token_recipe

_INIT_STD = 0.02


class Embedding(nn.Module):
    """The sum of a token's and its position's vector."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        dropped: Tensor = self.dropout(self.token(tokens) + self.position(positions))
        return dropped


class Attention(nn.Module):
    """Causal self-attention over several heads."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.rate = num_heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.qkv(hidden).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        rate = self.rate if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        dropped: Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return dropped


class Block(nn.Module):
    """Attention and an MLP, each normalized before and added to what came in."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        changed: Tensor = hidden + self.mlp(self.norm2(hidden))
        return changed


class Head(nn.Module):
    """The last norm and the logits over the vocabulary."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(hidden))
        return logits


class GPT(nn.Module):
    """A decoder-only language model."""

    def __init__(
        self,
        *,
        num_blocks: int,
        width: int,
        num_heads: int,
        vocabulary: int,
        context: int,
        dropout: float,
        tied: bool,
    ) -> None:
        super().__init__()
        self.embed = Embedding(vocabulary, context, width, dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_blocks))
        self.head = Head(width, vocabulary)
        for name, module in self.named_modules():
            _initialize(name, module, num_blocks)
        if tied:
            self.head.out.weight = self.embed.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def _initialize(name: str, module: nn.Module, num_blocks: int) -> None:
    """GPT-2's initial weights; what is added to the residual is smaller the deeper the model."""
    if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.is_meta:
        residual = name.endswith(("attention.out", "mlp.2"))
        nn.init.normal_(module.weight, 0.0, _INIT_STD / ((2 * num_blocks) ** 0.5 if residual else 1.0))
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def gpt(
    num_blocks: int = 4,
    width: int = 64,
    num_heads: int = 4,
    vocabulary: int = 256,
    context: int = 32,
    dropout: float = 0.1,
    tied: bool = False,
) -> Recipe:
    """A GPT of any size, by default a tiny one with weights of its own in the head."""
    if width % num_heads:
        raise ModelError(
            f"a width of {width} does not divide into {num_heads} heads",
            f"take a width of {width // num_heads * num_heads or num_heads}",
        )
    module = GPT(
        num_blocks=num_blocks,
        width=width,
        num_heads=num_heads,
        vocabulary=vocabulary,
        context=context,
        dropout=dropout,
        tied=tied,
    )
    blocks = {f"blocks.{index}": f"block{index}" for index in range(num_blocks)}
    return token_recipe(module, {"embed": "embed", **blocks, "head": "head"}, context)


def gpt2_small(
    num_blocks: int = 12,
    width: int = 768,
    num_heads: int = 12,
    vocabulary: int = 50257,
    context: int = 1024,
    dropout: float = 0.1,
    tied: bool = True,
) -> Recipe:
    """GPT-2 small: 124,439,808 parameters, the head sharing the embedding's weight."""
    return gpt(num_blocks, width, num_heads, vocabulary, context, dropout, tied)


def gpt2_small_untied(
    num_blocks: int = 12,
    width: int = 768,
    num_heads: int = 12,
    vocabulary: int = 50257,
    context: int = 1024,
    dropout: float = 0.1,
) -> Recipe:
    """GPT-2 small with weights of its own in the head: 163,037,184 parameters, cut anywhere."""
    return gpt(num_blocks, width, num_heads, vocabulary, context, dropout, tied=False)
