"""Small models for demonstrations and for tests: shaped like the large ones, trained in seconds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stagewright.models.recipe import Recipe, image_recipe


class TinyCNN(nn.Module):
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


def tiny_cnn(num_classes: int = 10, image_size: int = 32, label_smoothing: float = 0.0) -> Recipe:
    """conv1, conv2, fc1, fc2: 35,578 parameters with ten classes, no batch norm, no dropout."""
    names = {name: name for name in ("conv1", "conv2", "fc1", "fc2")}
    return image_recipe(TinyCNN(num_classes), names, image_size, label_smoothing)


class MLP(nn.Module):
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


def mlp(
    num_classes: int = 10,
    image_size: int = 8,
    width: int = 64,
    num_layers: int = 4,
    label_smoothing: float = 0.0,
) -> Recipe:
    """fc1 … fcN, all of one width."""
    names = {f"layers.{index}": f"fc{index + 1}" for index in range(num_layers)}
    module = MLP(3 * image_size * image_size, width, num_layers, num_classes)
    return image_recipe(module, names, image_size, label_smoothing)
