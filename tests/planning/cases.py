"""Small profiles and clusters for the planner's tests, and where the reference figures lie."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from stagewright.cluster import Cluster, Device, Host, Link
from stagewright.planning.options import PlanOptions
from stagewright.profile import LayerProfile, Profile

MIB, GIB = 1 << 20, 1 << 30
SHARED = Path(__file__).parents[3] / "shared"
PIPEDREAM = SHARED / "profiles" / "pipedream"
ROWS = {"vgg16": 128, "alexnet": 256, "gnmt": 128, "resnet50": 128}

needs_pipedream = pytest.mark.skipif(
    not PIPEDREAM.is_dir(), reason="PipeDream's profiles are not beside the repository"
)


def chain(
    seconds: tuple[float, ...],
    *,
    weights: tuple[int, ...] | None = None,
    outputs: tuple[float, ...] | None = None,
    saved: float = 0.0,
    rows: int = 8,
) -> Profile:
    """A chain of layers a, b, c …; forward takes a third of these seconds on `rows` rows, backward the rest."""
    layers = tuple(
        LayerProfile(
            name="abcdefghijklmnop"[number],
            forward_s=(each / 3,),
            backward_s=(each * 2 / 3,),
            output_bytes=0.0 if outputs is None else outputs[number],
            saved_bytes=saved,
            parameter_bytes=0 if weights is None else weights[number],
        )
        for number, each in enumerate(seconds)
    )
    return Profile(model="chain", device="cpu", source="analytic", batch_sizes=(rows,), layers=layers)


def random_profile(draw: random.Random, num_layers: int) -> Profile:
    """Layers of all kinds: heavy and light ones, some that read far back, some where no stage may begin."""
    layers = []
    for number in range(num_layers):
        far = {f"l{number - 1}", f"l{draw.randrange(number - 1)}"} if number > 2 and draw.random() < 0.3 else None
        layers.append(
            LayerProfile(
                name=f"l{number}",
                forward_s=(draw.uniform(0.001, 0.02), draw.uniform(0.02, 0.06)),
                backward_s=(draw.uniform(0.001, 0.02), draw.uniform(0.02, 0.12)),
                output_bytes=draw.choice([1e3, 1e5, 1e6, 4e6]),
                saved_bytes=draw.choice([1e5, 1e6, 2e6]),
                parameter_bytes=draw.choice([0, 10 * MIB, 100 * MIB, 400 * MIB]),
                inputs=None if far is None else tuple(sorted(far)),
                cuttable=draw.random() > 0.1,
            )
        )
    return Profile(
        model="random",
        device="cpu",
        source="analytic",
        batch_sizes=(4, 16),
        layers=tuple(layers),
        optimizer_s=draw.uniform(0, 0.02),
    )


def random_cluster(draw: random.Random, num_devices: int) -> Cluster:
    """One hub or several switches, wires that differ, devices that mostly differ in speed and memory."""
    devices = tuple(
        Device(
            kind="cpu",
            memory_bytes=int(draw.choice([1, 2, 4]) * GIB * draw.choice([1, 1.7])),
            speed=draw.choice([1.0, 1.0, 0.5, 2.0]),
        )
        for _ in range(num_devices)
    )
    if draw.random() < 0.3:
        devices = (Device(kind="cpu", memory_bytes=2 * GIB),) * num_devices
    width = draw.choice([1, 2, num_devices])
    links = [
        Link(ends=(str(n), f"s{n // width}"), kind="wire", bytes_per_s=draw.choice([1e9, 5e9, 2e10]), latency_s=1e-5)
        for n in range(num_devices)
    ]
    for switch in sorted({link.ends[1] for link in links}):
        links.append(Link(ends=(switch, "top"), kind="wire", bytes_per_s=draw.choice([5e8, 3e9])))
    return Cluster(name="random", hosts=(Host(devices=devices, links=tuple(links)),))


def random_options(draw: random.Random, *, wide: bool) -> PlanOptions:
    """A batch and, unless `wide`, one number of microbatches and one route."""
    return PlanOptions(
        batch=draw.choice([8, 24]),
        num_microbatches=None if wide else draw.choice([1, 2, 4]),
        route=None if wide else draw.choice(["split", "rotate"]),
        staleness=draw.choice(["0", "ssp", "2bw"]),
        recompute=draw.choice([None, False]),
    )
