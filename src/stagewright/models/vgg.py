"""VGG16, with and without batch norm: thirteen convolutions in five groups, three fully connected layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from stagewright.models.pooling import MaxPool
from stagewright.models.recipe import Recipe, image_recipe

_GROUPS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""The channels and the number of the convolutions between two poolings."""


class VGG(nn.Module):
    """Groups of 3×3 convolutions, pooling to 7×7, and three fully connected layers."""

    def __init__(self, num_classes: int, batch_norm: bool) -> None:
        super().__init__()
        self.features = nn.Sequential(*_convolutions(batch_norm))
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            *(nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)),
            *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)),
            nn.Linear(4096, num_classes),
        )
        for module in self.modules():
            _initialize(module)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))
        return logits


def _convolutions(batch_norm: bool) -> Iterator[nn.Module]:
    channels = 3
    for width, count in _GROUPS:
        for _ in range(count):
            yield nn.Conv2d(channels, width, 3, padding=1)
            if batch_norm:
                yield nn.BatchNorm2d(width)
            yield nn.ReLU(inplace=True)
            channels = width
        yield MaxPool(2, 2)


def _initialize(module: nn.Module) -> None:
    if not isinstance(module, nn.Conv2d | nn.Linear) or module.weight.is_meta:
        return
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    else:
        nn.init.normal_(module.weight, 0.0, 0.01)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


def vgg16(num_classes: int = 1000, image_size: int = 224, label_smoothing: float = 0.0) -> Recipe:
    """VGG16: 138,357,544 parameters."""
    module = VGG(num_classes, batch_norm=False)
    return image_recipe(module, _layer_names(module), image_size, label_smoothing)


def vgg16_bn(num_classes: int = 1000, image_size: int = 224, label_smoothing: float = 0.0) -> Recipe:
    """VGG16 with a batch norm after each convolution: 138,365,992 parameters."""
    module = VGG(num_classes, batch_norm=True)
    return image_recipe(module, _layer_names(module), image_size, label_smoothing)


def _layer_names(module: VGG) -> dict[str, str]:
    """conv1_1 … conv5_3 and fc1 … fc3, each begun by the module that has its weights."""
    convolutions = [index for index, child in enumerate(module.features) if isinstance(child, nn.Conv2d)]
    numbers = [(group, n) for group, (_, count) in enumerate(_GROUPS, 1) for n in range(1, count + 1)]
    names = {f"features.{index}": f"conv{g}_{n}" for index, (g, n) in zip(convolutions, numbers)}
    return names | {"classifier.0": "fc1", "classifier.3": "fc2", "classifier.6": "fc3"}
