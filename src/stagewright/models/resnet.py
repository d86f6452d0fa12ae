"""ResNet v1.5: the stride of a bottleneck is in its 3×3 convolution.

conv1 (bn1, relu, maxpool) │ layer1.0 │ layer1.1 │ … │ layer4.2 │ fc (avgpool) │ loss
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stagewright.models.recipe import Recipe, image_recipe

_WIDTHS = (64, 128, 256, 512)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(channels, width, stride)

    def forward(self, images: Tensor) -> Tensor:
        shortcut = images if self.downsample is None else self.downsample(images)
        images = self.relu(self.bn1(self.conv1(images)))
        added: Tensor = self.relu(self.bn2(self.conv2(images)) + shortcut)
        return added


class Bottleneck(nn.Module):
    """A 1×1, a 3×3 and a 1×1 convolution beside a shortcut."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(channels, width * self.expansion, stride)

    def forward(self, images: Tensor) -> Tensor:
        shortcut = images if self.downsample is None else self.downsample(images)
        images = self.relu(self.bn1(self.conv1(images)))
        images = self.relu(self.bn2(self.conv2(images)))
        added: Tensor = self.relu(self.bn3(self.conv3(images)) + shortcut)
        return added


_Block = type[BasicBlock] | type[Bottleneck]


def _shortcut(channels: int, width: int, stride: int) -> nn.Sequential | None:
    """A 1×1 convolution where the shape changes, nothing where it does not."""
    if channels == width and stride == 1:
        return None
    return nn.Sequential(nn.Conv2d(channels, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width))


class ResNet(nn.Module):
    """A stem, four groups of residual blocks, and one fully connected layer."""

    def __init__(self, block: _Block, counts: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = 64
        for number, (width, count) in enumerate(zip(_WIDTHS, counts), 1):
            self.add_module(f"layer{number}", _group(block, channels, width, count, 1 if number == 1 else 2))
            channels = width * block.expansion
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        images = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for number in range(1, len(_WIDTHS) + 1):
            images = self.get_submodule(f"layer{number}")(images)
        logits: Tensor = self.fc(torch.flatten(self.avgpool(images), 1))
        return logits


def _group(block: _Block, channels: int, width: int, count: int, stride: int) -> nn.Sequential:
    later = [block(width * block.expansion, width, 1) for _ in range(count - 1)]
    return nn.Sequential(block(channels, width, stride), *later)


def resnet18(num_classes: int = 1000, image_size: int = 224, label_smoothing: float = 0.0) -> Recipe:
    """ResNet-18: 11,689,512 parameters."""
    return _recipe(BasicBlock, (2, 2, 2, 2), num_classes, image_size, label_smoothing)


def resnet50(num_classes: int = 1000, image_size: int = 224, label_smoothing: float = 0.0) -> Recipe:
    """ResNet-50: 25,557,032 parameters."""
    return _recipe(Bottleneck, (3, 4, 6, 3), num_classes, image_size, label_smoothing)


def resnet101(num_classes: int = 1000, image_size: int = 224, label_smoothing: float = 0.0) -> Recipe:
    """ResNet-101: 44,549,160 parameters."""
    return _recipe(Bottleneck, (3, 4, 23, 3), num_classes, image_size, label_smoothing)


def _recipe(block: _Block, counts: Sequence[int], num_classes: int, image_size: int, label_smoothing: float) -> Recipe:
    blocks = [f"layer{number}.{i}" for number, count in enumerate(counts, 1) for i in range(count)]
    names = {"conv1": "conv1", **{name: name for name in blocks}, "avgpool": "fc"}
    return image_recipe(ResNet(block, counts, num_classes), names, image_size, label_smoothing)
