"""Pooling that leaves small images alone, so that one model serves many image sizes."""

from __future__ import annotations

from torch import Tensor, nn


class MaxPool(nn.MaxPool2d):
    """Max pooling, skipped where the image is smaller than the window."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if _fits(input, self.kernel_size) else input


class AvgPool(nn.AvgPool2d):
    """Average pooling, skipped where the image is smaller than the window."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if _fits(input, self.kernel_size) else input


def _fits(images: Tensor, window: object) -> bool:
    return isinstance(window, int) and min(images.shape[-2:]) >= window
