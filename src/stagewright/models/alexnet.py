"""AlexNet: the one of torchvision, and the one of the OneFlow benchmarks.

conv1  conv2  conv3  conv4  conv5 │ fc1  fc2  fc3 │ loss       6 % of the weights │ 94 %
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stagewright.models.pooling import AvgPool, MaxPool
from stagewright.models.recipe import Recipe, image_recipe


class AlexNet(nn.Module):
    """Convolutions, pooling to a fixed size, and three fully connected layers."""

    def __init__(self, features: nn.Sequential, classifier: nn.Sequential, pooled: int) -> None:
        super().__init__()
        self.features = features
        self.avgpool = nn.AdaptiveAvgPool2d((pooled, pooled))
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))
        return logits


def alexnet(num_classes: int = 1000, image_size: int = 224, label_smoothing: float = 0.0) -> Recipe:
    """torchvision's AlexNet: 61,100,840 parameters, max pooling, dropout before fc1 and fc2."""
    features = nn.Sequential(
        *(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(inplace=True), MaxPool(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), MaxPool(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True), MaxPool(3, 2)),
    )
    classifier = nn.Sequential(
        *(nn.Dropout(0.5), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(inplace=True)),
        *(nn.Dropout(0.5), nn.Linear(4096, 4096), nn.ReLU(inplace=True)),
        nn.Linear(4096, num_classes),
    )
    module = AlexNet(features, classifier, pooled=6)
    return image_recipe(module, _layer_names(module), image_size, label_smoothing)


def alexnet_of(num_classes: int = 1000, image_size: int = 224, label_smoothing: float = 0.0) -> Recipe:
    """OneFlow's AlexNet: 50,303,912 parameters, average pooling, dropout after fc1 and fc2."""
    features = nn.Sequential(
        *(nn.Conv2d(3, 64, 11, stride=4), nn.ReLU(inplace=True), AvgPool(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), AvgPool(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(384, 384, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True), AvgPool(3, 2)),
    )
    classifier = nn.Sequential(
        *(nn.Linear(256 * 5 * 5, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        nn.Linear(4096, num_classes),
    )
    module = AlexNet(features, classifier, pooled=5)
    return image_recipe(module, _layer_names(module), image_size, label_smoothing)


def _layer_names(module: AlexNet) -> dict[str, str]:
    """conv1 … conv5 and fc1 … fc3, each begun by the module that has its weights."""
    names: dict[str, str] = {}
    for kind, prefix, part in (
        (nn.Conv2d, "conv", module.features),
        (nn.Linear, "fc", module.classifier),
    ):
        owner = "features" if part is module.features else "classifier"
        indices = [index for index, child in enumerate(part) if isinstance(child, kind)]
        names |= {f"{owner}.{index}": f"{prefix}{number}" for number, index in enumerate(indices, 1)}
    return names
