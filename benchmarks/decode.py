"""Images/s of the image feed against Pillow in a torch DataLoader: same files, same crops, same numbers out.

    python benchmarks/decode.py [--images 256] [--repeats 5] [--workers 2]

Photo-like JPEGs (noise of 1/f spectrum, about the bytes a pixel of ImageNet) are written as OFRecord to a temporary
directory. Rows of the table alternate within every repeat; the median of the repeats is shown with the spread.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from stagewright.data.opening import open_dataset
from stagewright.data.order import Draw, draw_uniform
from stagewright.data.pixels import IMAGENET_MEAN, IMAGENET_STD, EvalTransform, TrainTransform, Transform
from stagewright.data.records import write_images
from stagewright.data.source import Dataset
from stagewright.runtime.feed import ReadAhead
from stagewright.runtime.settings import Settings
from stagewright.scheduling.drawing import sketch_plan
from stagewright.training.feeds import DataFeed

SIZES = ((375, 500), (768, 1024))
BATCH = 64


def photo(height: int, width: int, seed: int) -> bytes:
    """A JPEG of noise whose amplitude falls with frequency, as in photographs."""
    random = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None, :])
    frequency[0, 0] = 1 / max(height, width)
    shared = random.standard_normal((height, width))
    planes = []
    for _ in range(3):
        spectrum = np.fft.fft2(0.9 * shared + 0.3 * random.standard_normal((height, width))) / frequency**1.1
        plane = np.fft.ifft2(spectrum).real
        planes.append(128 + 55 * (plane - plane.mean()) / plane.std())
    stream = io.BytesIO()
    Image.fromarray(np.clip(np.stack(planes, axis=-1), 0, 255).astype(np.uint8)).save(stream, "JPEG", quality=91)
    return stream.getvalue()


class PillowRows(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """The usual way: open, convert, crop and resize, mirror, to a tensor of [0, 1], mean and deviation."""

    def __init__(self, dataset: Dataset, transform: Transform) -> None:
        self.dataset, self.transform = dataset, transform
        self.mean = torch.tensor(IMAGENET_MEAN)[:, None, None]
        self.std = torch.tensor(IMAGENET_STD)[:, None, None]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draws = draw_uniform(0, 0, Draw.CROP, index, num=self.transform.num_draws)[0]
        image = Image.open(io.BytesIO(self.dataset.encoded(index))).convert("RGB")
        crop = self.transform.crop(image.height, image.width, draws.tolist())
        box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
        image = image.resize((self.transform.size,) * 2, Image.Resampling.BILINEAR, box=box)
        if crop.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels.float().div(255).sub_(self.mean).div_(self.std), self.dataset.label(index)


def with_pillow(dataset: Dataset, transform: Transform, workers: int) -> None:
    for _ in DataLoader(PillowRows(dataset, transform), BATCH, num_workers=workers):
        pass


def with_feed(dataset: Dataset, transform: Transform) -> None:
    feed = DataFeed(dataset, size=transform.size, is_training=isinstance(transform, TrainTransform))
    feed.settle(sketch_plan((1,), batch=BATCH), Settings())
    ahead = ReadAhead(feed, torch.device("cpu"))
    for batch in range(len(dataset) // BATCH):
        ahead.inputs(batch, 0, BATCH)
        ahead.targets(batch, 0, BATCH)


def measure(calls: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every call, the calls in turn within every repeat, after one round that is not counted."""
    times_s: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            start_s = time.perf_counter()
            call()
            if repeat:
                times_s[name].append(time.perf_counter() - start_s)
    return times_s


def contenders(dataset: Dataset, transform: Transform, workers: int) -> dict[str, Callable[[], None]]:
    """Pillow first, which the others are compared with."""
    calls: dict[str, Callable[[], None]] = {"Pillow, DataLoader": lambda: with_pillow(dataset, transform, workers)}
    calls["DataFeed, simplejpeg"] = lambda: with_feed(dataset, transform)
    return calls


def add_rows(table: Table, what: str, num_images: int, cores: int, times_s: dict[str, list[float]]) -> None:
    """A row a contender: images/s per core, spread, and the factor over the first."""
    first = statistics.median(next(iter(times_s.values())))
    for name, seconds in times_s.items():
        median = statistics.median(seconds)
        spread = (max(seconds) - min(seconds)) / median
        rate = num_images / median / cores
        table.add_row(what, name, str(cores), f"{rate:,.0f}", f"{spread:.0%}", f"{first / median:.2f} ×")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--images", type=int, default=256)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--workers", type=int, default=2)
    options = arguments.parse_args()
    table = Table("images", "read by", "cores", "images/s per core", "spread", "against Pillow")
    with tempfile.TemporaryDirectory() as root:
        for height, width in SIZES:
            run_size(table, Path(root), height, width, options)
    Console(width=110).print(table)


def run_size(table: Table, root: Path, height: int, width: int, options: Any) -> None:
    """Training and evaluation crops on one core, then training crops on several."""
    directory = root / f"{width}x{height}"
    photos = [photo(height, width, seed) for seed in range(16)]
    write_images(directory, ((photos[n % 16], n % 10) for n in range(options.images)), "ofrecord")
    dataset = open_dataset(directory)
    kilobytes = sum(map(len, photos)) / 16 / 1000
    every_core = os.sched_getaffinity(0)
    settings = [("train", TrainTransform(), 1), ("eval", EvalTransform(), 1)]
    if options.workers > 1:
        settings.append(("train", TrainTransform(), options.workers))
    for kind, transform, cores in settings:
        os.sched_setaffinity(0, set(sorted(every_core)[-cores:]))
        torch.set_num_threads(1)
        times_s = measure(contenders(dataset, transform, 0 if cores == 1 else cores), options.repeats)
        add_rows(table, f"{width} × {height}, {kilobytes:.0f} kB, {kind}", options.images, cores, times_s)
    os.sched_setaffinity(0, every_core)


if __name__ == "__main__":
    main()
