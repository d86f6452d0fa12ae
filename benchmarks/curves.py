"""Training curves on real images: a small ResNet, data parallel and in two pipelines, to over 90 % top-1.

    python benchmarks/curves.py [FOLDER] [--epochs 5] [--images 2000] [--only dp]

Makes a set of coloured shapes, trains ResNet-18 at 32 × 32 pixels on four worker processes, evaluates it on images it
has not seen after every epoch, and writes a report with the curves. The table says how good each run ended, how long
it took in all, workers' start included, and when it passed 90 %.

Batch norm sees the rows of one replica's microbatch, so the batch leaves 16 rows there at least.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

import stagewright as sw

RUNS = {
    "dp": "--devices 4",
    "3-1 1f1b": "--placement 0:0-2.0:3 --cut layer4.0 --schedule 1f1b --microbatches 2",
    "3-1 ssp": "--placement 0:0-2.0:3 --cut layer4.0 --staleness ssp",
}
TRAINING = (
    "--image-size 32 --crop-area 0.5 --batch 96 --learning-rate 0.02 --weight-decay 1e-4 --decay cosine "
    "--warm-up-epochs 1 --log-every 10 --device cpu"
)
GOAL = 0.9

console = Console(highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Curve:
    """One run: its record and how long the whole command took."""

    record: sw.Record
    seconds: float

    @property
    def top_1(self) -> list[tuple[float, float]]:
        """Seconds since the first step, and the share of unseen images that were named right."""
        return [(point.seconds, point.value) for point in self.record.points if point.name == "validation_top_1"]

    @property
    def reached_s(self) -> float | None:
        """When the goal was passed."""
        return next((seconds for seconds, value in self.top_1 if value > GOAL), None)


def command(*words: str) -> None:
    """Runs `stagewright` with these words; its output is this one's."""
    subprocess.run([sys.executable, "-m", "stagewright", *words], check=True)


def make_data(folder: Path, num_images: int) -> None:
    """Images to learn from, and others of the same classes to evaluate on, where they are not there yet."""
    for name, images, seed in (("train", num_images, 0), ("validation", num_images // 4, 1)):
        if not (folder / name).exists():
            words = f"data make {folder / name} --images {images} --seed {seed} --format ofrecord --images-per-file 500"
            command(*words.split())


def train(name: str, folder: Path, epochs: int) -> Curve:
    """Trains one of RUNS."""
    console.print(f"\n{name}: stagewright train resnet18 {RUNS[name]} …")
    out = folder / name.replace(" ", "-")
    words = (
        f"--data {folder / 'train'} --evaluation-data {folder / 'validation'} --epochs {epochs} -o {out} --overwrite"
    )
    started = perf_counter()
    command("train", "resnet18", *TRAINING.split(), *RUNS[name].split(), *words.split())
    seconds = perf_counter() - started
    return Curve(replace(sw.Record.load(out / "record.json"), name=f"resnet18 {name}"), seconds)


def table_of(curves: dict[str, Curve]) -> Table:
    """A line a run."""
    table = Table(box=None, padding=(0, 2))
    for title in ("run", "top-1", "seconds in all", f"seconds to {GOAL:.0%}", "images/s", "step"):
        table.add_column(title, justify="left" if title == "run" else "right")
    for name, curve in curves.items():
        reached = "never" if curve.reached_s is None else f"{curve.reached_s:.0f}"
        record, best = curve.record, curve.top_1[-1][1]
        speed = (f"{record.samples_per_s:.0f}", f"{record.median_step_s * 1e3:.0f} ms")
        table.add_row(name, f"{best:.1%}", f"{curve.seconds:.0f}", reached, *speed)
    return table


def main() -> None:
    """Makes the data, trains, reports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("out/curves"))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--only", choices=RUNS, action="append")
    chosen = parser.parse_args()
    make_data(chosen.folder, chosen.images)
    curves = {name: train(name, chosen.folder, chosen.epochs) for name in chosen.only or RUNS}
    report = sw.make_report([curve.record for curve in curves.values()], chosen.folder / "report")
    console.print("\n", table_of(curves), f"\n  {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    console.print(f"  report: {report.page}")


if __name__ == "__main__":
    main()
