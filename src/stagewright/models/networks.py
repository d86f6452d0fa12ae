"""The networks of the zoo: AlexNet, VGG16 and ResNet v1.5 as torchvision has them, GPT-2, and two small ones.

AlexNet   conv1 … conv5 │ fc1 │ fc2 │ fc3 │ loss       6 % of the weights │ 94 %
VGG16     conv1_1 │ conv1_2 │ … │ conv5_3 │ fc1 │ fc2 │ fc3 │ loss
ResNet    conv1 (bn1, relu, maxpool) │ layer1.0 │ layer1.1 │ … │ layer4.2 │ fc (avgpool) │ loss
GPT-2     embed │ block0 │ block1 │ … │ head │ loss
            └────── one weight, if tied ──┘         a tied model is cut like any other
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stagewright.errors import ModelError
from stagewright.models.loss import Loss, cross_entropy_sum, token_cross_entropy_sum


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A module, the layer that each of its submodules starts, and one row of inputs and targets."""

    module: nn.Module
    layers: Mapping[str, str]
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss: Loss


def image_recipe(module: nn.Module, layers: Mapping[str, str], image_size: int) -> Recipe:
    """A classifier of square images with three channels."""
    return Recipe(
        module=module, layers=layers, inputs=(torch.zeros(1, 3, image_size, image_size),),
        targets=(torch.zeros(1, dtype=torch.int64),), loss=cross_entropy_sum(),
    )  # fmt: skip


# AlexNet and VGG


class _ConvNet(nn.Module):
    """Convolutions, pooling to a fixed size, and three fully connected layers."""

    def __init__(self, features: nn.Sequential, classifier: nn.Sequential, pooled: int) -> None:
        super().__init__()
        self.features = features
        self.avgpool = nn.AdaptiveAvgPool2d((pooled, pooled))
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))
        return logits


class _Pool(nn.Module):
    """Pooling, skipped where the image is smaller than the window, so that one model serves many image sizes."""

    def __init__(self, pool: Callable[..., Tensor], window: int) -> None:
        super().__init__()
        self.pool, self.window = pool, window

    def forward(self, images: Tensor) -> Tensor:
        return self.pool(images, self.window, 2) if min(images.shape[-2:]) >= self.window else images


def alexnet(is_torchvision: bool, num_classes: int = 1000, image_size: int = 224) -> Recipe:
    """torchvision's AlexNet or OneFlow's."""
    pool, padding, fourth, pooled = (F.max_pool2d, 2, 256, 6) if is_torchvision else (F.avg_pool2d, 0, 384, 5)
    features = nn.Sequential(
        *(nn.Conv2d(3, 64, 11, stride=4, padding=padding), nn.ReLU(inplace=True), _Pool(pool, 3)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), _Pool(pool, 3)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(384, fourth, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(fourth, 256, 3, padding=1), nn.ReLU(inplace=True), _Pool(pool, 3)),
    )
    module = _ConvNet(features, _classifier(256 * pooled**2, num_classes, drops_first=is_torchvision), pooled)
    return _by_weights(module, (f"conv{number}" for number in range(1, 6)), image_size)


def _classifier(inputs: int, num_classes: int, *, drops_first: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, 4096):
        linear, dropout = (nn.Linear(width, 4096), nn.ReLU(inplace=True)), nn.Dropout(0.5)
        layers += (dropout, *linear) if drops_first else (*linear, dropout)
    return nn.Sequential(*layers, nn.Linear(4096, num_classes))


def _by_weights(module: _ConvNet, convolutions: Iterable[str], image_size: int) -> Recipe:
    """The layers begin with the modules that have weights."""
    starts = [path for path, each in module.named_modules() if isinstance(each, nn.Conv2d | nn.Linear)]
    return image_recipe(module, dict(zip(starts, (*convolutions, "fc1", "fc2", "fc3"))), image_size)


_VGG_GROUPS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""The channels and the number of the convolutions between two poolings."""


def vgg16(batch_norm: bool, num_classes: int = 1000, image_size: int = 224) -> Recipe:
    """VGG16, with or without a batch norm after each convolution."""
    features: list[nn.Module] = []
    channels = 3
    for width, count in _VGG_GROUPS:
        for _ in range(count):
            norm = (nn.BatchNorm2d(width),) if batch_norm else ()
            features += (nn.Conv2d(channels, width, 3, padding=1), *norm, nn.ReLU(inplace=True))
            channels = width
        features.append(_Pool(F.max_pool2d, 2))
    module = _ConvNet(nn.Sequential(*features), _classifier(512 * 7 * 7, num_classes), pooled=7)
    _draw(module, linear_std=0.01)
    names = (f"conv{g}_{n}" for g, (_, count) in enumerate(_VGG_GROUPS, 1) for n in range(1, count + 1))
    return _by_weights(module, names, image_size)


def _draw(model: nn.Module, linear_std: float | None = None) -> None:
    """torchvision's initial weights: of convolutions, and of linear layers where a deviation is given."""
    for module in model.modules():
        if not isinstance(module, nn.Conv2d | nn.Linear) or module.weight.is_meta:
            continue
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif linear_std is not None:
            nn.init.normal_(module.weight, 0.0, linear_std)
        if linear_std is not None and module.bias is not None:
            nn.init.zeros_(module.bias)


# ResNet


class _Residual(nn.Module):
    """Two 3×3 convolutions beside a shortcut, or a 1×1, a 3×3 and a 1×1; the first 3×3 has the stride."""

    def __init__(self, channels: int, width: int, stride: int, *, is_bottleneck: bool) -> None:
        super().__init__()
        kernels, out = ((1, 3, 1), 4 * width) if is_bottleneck else ((3, 3), width)
        self.depth, before = len(kernels), channels
        for number, kernel in enumerate(kernels, 1):
            after = out if number == self.depth else width
            step = stride if number == kernels.index(3) + 1 else 1
            conv = nn.Conv2d(before, after, kernel, stride=step, padding=kernel // 2, bias=False)
            self.add_module(f"conv{number}", conv)
            self.add_module(f"bn{number}", nn.BatchNorm2d(after))
            before = after
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if channels != out or stride != 1:
            conv = nn.Conv2d(channels, out, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(out))

    def forward(self, images: Tensor) -> Tensor:
        shortcut = images if self.downsample is None else self.downsample(images)
        for number in range(1, self.depth + 1):
            images = self.get_submodule(f"bn{number}")(self.get_submodule(f"conv{number}")(images))
            images = self.relu(images if number < self.depth else images + shortcut)
        return images


class ResNet(nn.Module):
    """A stem, four groups of residual blocks, and one fully connected layer."""

    def __init__(self, is_bottleneck: bool, counts: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = 64
        for number, count in enumerate(counts, 1):
            width, group = 32 * 2**number, nn.Sequential()
            for index in range(count):
                stride = 2 if number > 1 and index == 0 else 1
                group.append(_Residual(channels, width, stride, is_bottleneck=is_bottleneck))
                channels = 4 * width if is_bottleneck else width
            self.add_module(f"layer{number}", group)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, num_classes)
        _draw(self)

    def forward(self, images: Tensor) -> Tensor:
        images = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for number in range(1, 5):
            images = self.get_submodule(f"layer{number}")(images)
        logits: Tensor = self.fc(torch.flatten(self.avgpool(images), 1))
        return logits


def resnet(is_bottleneck: bool, counts: Sequence[int], num_classes: int = 1000, image_size: int = 224) -> Recipe:
    """A ResNet with as many residual blocks in each of its groups."""
    blocks = [f"layer{number}.{i}" for number, count in enumerate(counts, 1) for i in range(count)]
    names = {"conv1": "conv1", **{name: name for name in blocks}, "avgpool": "fc"}
    return image_recipe(ResNet(is_bottleneck, counts, num_classes), names, image_size)


# Small ones for demonstrations and tests: shaped like the large ones, trained in seconds


class _TinyCNN(nn.Module):
    """Two convolutions with little weight and a fully connected layer with most of it."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d((4, 4))
        self.fc1 = nn.Linear(256, 128)
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        images = self.relu(self.conv2(self.relu(self.conv1(images))))
        logits: Tensor = self.fc2(self.relu(self.fc1(torch.flatten(self.pool(images), 1))))
        return logits


def tiny_cnn(num_classes: int = 10, image_size: int = 32) -> Recipe:
    """Without batch norm and dropout."""
    names = {name: name for name in ("conv1", "conv2", "fc1", "fc2")}
    return image_recipe(_TinyCNN(num_classes), names, image_size)


class _MLP(nn.Module):
    """Fully connected layers over flattened images."""

    def __init__(self, inputs: int, width: int, num_layers: int, num_classes: int) -> None:
        super().__init__()
        sizes = [inputs, *[width] * (num_layers - 1), num_classes]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in zip(sizes, sizes[1:]))

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.flatten(images, 1)
        for layer in self.layers[:-1]:
            hidden = torch.relu(layer(hidden))
        logits: Tensor = self.layers[-1](hidden)
        return logits


def mlp(num_classes: int = 10, image_size: int = 8, width: int = 64, num_layers: int = 4) -> Recipe:
    """Layers of one width."""
    names = {f"layers.{index}": f"fc{index + 1}" for index in range(num_layers)}
    return image_recipe(_MLP(3 * image_size * image_size, width, num_layers, num_classes), names, image_size)


# GPT-2


class _Embedding(nn.Module):
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


class _Attention(nn.Module):
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


class _Block(nn.Module):
    """Attention and an MLP, each normalized before and added to what came in."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, num_heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        changed: Tensor = hidden + self.mlp(self.norm2(hidden))
        return changed


class _Head(nn.Module):
    """The last norm and the logits over the vocabulary."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(hidden))
        return logits


class GPT(nn.Module):
    """A decoder-only language model with GPT-2's initial weights."""

    def __init__(self, embed: nn.Module, blocks: Iterable[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = embed, nn.ModuleList(blocks), head
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.is_meta:
                is_residual = name.endswith(("attention.out", "mlp.2"))  # smaller the deeper the model
                nn.init.normal_(module.weight, 0.0, 0.02 / ((2 * len(self.blocks)) ** 0.5 if is_residual else 1.0))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def gpt(
    num_blocks: int = 4, width: int = 64, num_heads: int = 4, vocabulary: int = 256, context: int = 32,
    dropout: float = 0.1, tied: bool = False,
) -> Recipe:  # fmt: skip
    """A GPT of any size over rows of `context` tokens, with the next tokens as targets."""
    if width % num_heads:
        raise ModelError(
            f"a width of {width} does not divide into {num_heads} heads",
            f"take a width of {width // num_heads * num_heads or num_heads}",
        )
    embed = _Embedding(vocabulary, context, width, dropout)
    blocks = [_Block(width, num_heads, dropout) for _ in range(num_blocks)]
    head = _Head(width, vocabulary)
    module = GPT(embed, blocks, head)
    if tied:
        head.out.weight = embed.token.weight
    tokens = torch.zeros(1, context, dtype=torch.int64)
    names = {"embed": "embed", **{f"blocks.{index}": f"block{index}" for index in range(num_blocks)}, "head": "head"}
    return Recipe(module=module, layers=names, inputs=(tokens,), targets=(tokens,), loss=token_cross_entropy_sum())
