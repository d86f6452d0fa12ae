"""Small made-up records: a pipeline whose stages take given times, drawn by a list scheduler of a few lines."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from stagewright.cluster import Cluster, Device, DeviceId, Host, Link
from stagewright.plan import Plan, Stage
from stagewright.record import DeviceUse, Point, Record, Source, Span
from stagewright.report import Failure

GIB = 1 << 30
SHARES = {"weights": 0.09, "versions": 0.06, "gradients": 0.09, "optimizer": 0.1, "activations": 0.5, "framework": 0.16}


def make_plan(
    replicas: Sequence[int] = (7, 1),
    *,
    model: str = "VGG16",
    batch: int = 224,
    num_microbatches: int = 1,
    versions: Sequence[int] | None = None,
    hosts: int = 1,
    policy: str = "1f1b",
) -> Plan:
    """A plan over devices in order, `ssp` where it has several stages."""
    total = sum(replicas)
    ids = iter([DeviceId(index // (total // hosts), index % (total // hosts)) for index in range(total)])
    kept = versions or [len(replicas) - stage for stage in range(len(replicas))]
    stages = tuple(
        Stage(layers=(f"part{stage}",), devices=tuple(next(ids) for _ in range(count)), versions=kept[stage])
        for stage, count in enumerate(replicas)
    )
    return Plan(model=model, stages=stages, batch=batch, num_microbatches=num_microbatches, policy=policy)  # type: ignore[arg-type]


def make_spans(plan: Plan, num_batches: int, forward_s: Sequence[float], transfer_s: float = 0.004) -> Iterator[Span]:
    """Spans of a 1F1B pipeline over the batches: backward takes twice a forward, each unit waits for its neighbours."""
    last, units = len(plan.stages) - 1, range(num_batches * plan.num_microbatches)
    orders = [list(unit_order(len(units), last - stage)) for stage in range(last + 1)]
    done: dict[tuple[str, int, int], float] = {}
    clocks = [0.0] * (last + 1)
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, unit = order[0]
                ready = ready_at(kind, stage, unit, last, done, transfer_s)
                if ready is None:
                    break
                order.pop(0)
                start = max(ready, clocks[stage])
                stop = start + forward_s[stage] * (1 if kind == "F" else 2)
                done[kind, stage, unit] = clocks[stage] = stop
                yield from unit_spans(plan, kind, stage, unit, start, stop, transfer_s)
                if kind == "B" and (unit + 1) % plan.num_microbatches == 0:
                    yield from update_spans(plan, stage, unit // plan.num_microbatches, stop)
                    clocks[stage] = stop + 0.006


def unit_order(num_units: int, warmup: int) -> Iterator[tuple[str, int]]:
    """F0 F1 B0 F2 B1 … for a warm-up of one."""
    for unit in range(num_units + warmup):
        if unit < num_units:
            yield "F", unit
        if unit >= warmup:
            yield "B", unit - warmup


def ready_at(
    kind: str, stage: int, unit: int, last: int, done: dict[tuple[str, int, int], float], transfer_s: float
) -> float | None:
    """When a unit's input is there; None while it is not."""
    if kind == "F":
        return 0.0 if stage == 0 else add(done.get(("F", stage - 1, unit)), transfer_s)
    return done.get(("F", stage, unit)) if stage == last else add(done.get(("B", stage + 1, unit)), transfer_s)


def add(value: float | None, more: float) -> float | None:
    return None if value is None else value + more


def unit_spans(
    plan: Plan, kind: str, stage: int, unit: int, start: float, stop: float, transfer_s: float
) -> Iterator[Span]:
    """The computation on every replica, and the sending and receiving that follows it."""
    batch, microbatch = divmod(unit, plan.num_microbatches)
    neighbour = stage + 1 if kind == "F" else stage - 1
    for worker in plan.workers[stage]:
        yield Span(worker, kind, stage, batch, microbatch, start, stop)
        for peer in plan.workers[neighbour] if 0 <= neighbour < len(plan.stages) else ():
            yield Span(worker, f"S{kind}", stage, batch, microbatch, stop, stop + transfer_s, peer)
            yield Span(peer, f"R{kind}", stage, batch, microbatch, stop, stop + transfer_s, worker)


def update_spans(plan: Plan, stage: int, batch: int, stop: float) -> Iterator[Span]:
    """A reduction among the replicas and the update."""
    for worker in plan.workers[stage]:
        if len(plan.workers[stage]) > 1:
            yield Span(worker, "G", stage, batch, -1, stop - 0.01, stop, 0)
        yield Span(worker, "U", stage, batch, -1, stop, stop + 0.006)


def make_uses(plan: Plan, peaks_gib: Sequence[float], busy: Sequence[float], end_s: float) -> tuple[DeviceUse, ...]:
    """For each device its peak by kind and a memory curve that breathes with the activations."""
    uses = []
    for worker, device in enumerate(plan.devices):
        stages = tuple(stage for stage, workers in enumerate(plan.workers) if worker in workers)
        peak = int(peaks_gib[stages[0]] * GIB)
        parts = {kind: int(peak * share) for kind, share in SHARES.items()}
        times = [end_s * index / 200 for index in range(201)]
        curve = {kind: tuple(breathe(kind, parts[kind], index) for index in range(201)) for kind in parts}
        uses.append(
            DeviceUse(
                device=str(device), stages=stages, busy_share=busy[stages[0]], peak_bytes=peak, peak_parts=parts,
                driver_bytes=peak + GIB // 2, memory_s=tuple(times), memory_parts=curve,
            )
        )  # fmt: skip
    return tuple(uses)


def breathe(kind: str, peak: int, index: int) -> int:
    return int(peak * (0.35 + 0.65 * abs(math.sin(index / 9)))) if kind == "activations" else peak


def make_record(
    name: str = "vgg16-7-1",
    source: Source = "measured",
    replicas: Sequence[int] = (7, 1),
    *,
    samples_per_s: float = 1488.0,
    model: str = "VGG16",
    batch: int = 224,
    num_microbatches: int = 1,
    num_batches: int = 6,
    hosts: int = 1,
    versions: Sequence[int] | None = None,
    policy: str = "1f1b",
    peaks_gib: Sequence[float] = (6.9, 3.1, 2.5, 2.0),
    busy: Sequence[float] = (0.97, 0.37, 0.6, 0.5),
    cluster: str = "titan-v-8",
    limit: str = "compute of stage 0",
    with_spans: bool = True,
    with_points: bool = False,
    seed: int = 0,
    **more: object,
) -> Record:
    """A record of `num_batches` steps at about the given rate."""
    dice = random.Random(f"{name} {seed}")
    plan = make_plan(
        replicas, model=model, batch=batch, num_microbatches=num_microbatches, versions=versions, hosts=hosts,
        policy=policy,
    )  # fmt: skip
    step = batch / samples_per_s
    unit = step / num_microbatches / 3.1
    forward = [unit * share for share in busy[: len(replicas)]]
    spans = tuple(make_spans(plan, num_batches, forward, unit / 6)) if with_spans else ()
    end = max((span.stop_s for span in spans), default=1.0)
    exact = source == "simulated"
    steps = tuple(step * (1 if exact else dice.uniform(0.995, 1.005)) for _ in range(5))
    return Record(
        name=name, source=source, plan=plan, cluster=cluster, epoch_samples=1_281_167, step_s=steps, step_samples=batch,
        devices=make_uses(plan, peaks_gib, busy, end), spans=spans, limit=limit,
        points=tuple(make_points(dice)) if with_points else (),
        command=f"stagewright train {model.lower()} --batch {batch} --placement {plan.placement}",
        environment={} if exact else {"GPU": "8 × TITAN V", "driver": "550.54", "torch": "2.13.0", "commit": "1a2b3c4"},
        **more,
    )  # type: ignore[arg-type]  # fmt: skip


def make_points(dice: random.Random) -> Iterator[Point]:
    """A loss that falls and an accuracy that rises."""
    for step in range(0, 2000, 10):
        loss = 2.2 + 4.7 * math.exp(-step / 600) + dice.uniform(-0.12, 0.12)
        yield Point(name="loss", step=step, epoch=step / 1000, value=loss)
    for epoch in (1, 2):
        yield Point(name="top-1", step=epoch * 1000, epoch=epoch, value=0.14 * epoch + dice.uniform(0, 0.02))


def make_titan() -> Cluster:
    """Eight cards behind two switches."""
    card = Device(kind="TITAN V", memory_bytes=int(11.8 * GIB))
    links = [Link(ends=(str(i), f"switch{i // 4}"), kind="PCIe 3 x16", bytes_per_s=12e9) for i in range(8)]
    links += [Link(ends=(f"switch{i}", "cpu"), kind="PCIe 3 x16", bytes_per_s=12e9) for i in range(2)]
    links += [Link(ends=("cpu", "nic"), kind="PCIe 3 x8", bytes_per_s=6e9)]
    return Cluster(name="titan-v-8", hosts=(Host(devices=(card,) * 8, links=tuple(links)),))


def make_v100(hosts: int = 4) -> Cluster:
    """Hosts with eight cards each, joined by an ordinary network."""
    box = make_titan().hosts[0]
    card = Device(kind="V100", memory_bytes=16 * GIB)
    wires = tuple(Link(ends=(f"{i}:nic", "net"), kind="25 Gb Ethernet", bytes_per_s=2.9e9) for i in range(hosts))
    return Cluster(name="v100-4x8", hosts=(Host(devices=(card,) * 8, links=box.links),) * hosts, links=wires)


def make_suite() -> tuple[list[Record], list[Failure], list[Cluster]]:
    """What a suite over three models leaves behind: measured, rehearsed, simulated and failed cases."""
    records = []
    for seed in range(7):
        rate = 1488 * (1 + (seed - 3) * 0.003)
        records.append(make_record(samples_per_s=rate, seed=seed, with_points=True))
        records.append(dp("vgg16-dp-8", 702 * (1 + (3 - seed) * 0.004), 8, seed=seed, with_points=True))
    records += [make_record(source="simulated", samples_per_s=1501), dp("vgg16-dp-8", 691, 8, source="simulated")]
    records += [make_record(source="rehearsed", samples_per_s=1420, seed=9), dp("vgg16-dp-1", 189, 1, batch=32)]
    records += [make_record("vgg16-5-2-1", "simulated", (5, 2, 1), samples_per_s=1310, num_microbatches=4)]
    for devices in (1, 8, 16, 32):
        more = {"model": "ResNet50", "precision": "fp16", "hosts": max(devices // 8, 1), "cluster": "v100-4x8"}
        name, rate = f"resnet50-amp-{devices}", 812 * devices * (1 - 0.03 * math.log2(devices))
        records.append(
            dp(name, rate, devices, source="simulated", batch=128 * devices, with_spans=devices == 8, **more)
        )
    failure = Failure(
        name="vgg16-dp-8-batch-512", model="VGG16", placement="0:0-7",
        reason="stage 0 needs 14.2 GiB on 0:0, which has 11.8 GiB: use a smaller batch, or add --recompute",
    )  # fmt: skip
    return records, [failure], [make_titan(), make_v100()]


def dp(name: str, rate: float, devices: int, *, batch: int = 224, **more: object) -> Record:
    """Data parallelism over some devices."""
    limit = "all-reduce of fc1 (392 MiB, 198 ms exposed)" if devices > 1 else "compute of stage 0"
    chosen = {"samples_per_s": rate, "batch": batch, "peaks_gib": (7.0,), "busy": (0.5,), "limit": limit, **more}
    return make_record(name, replicas=(devices,), **chosen)  # type: ignore[arg-type]


def save_all(records: Sequence[Record], folder: Path) -> None:
    """The records as files, a number for each repetition."""
    for number, record in enumerate(records):
        record.save(folder / record.source / f"{record.name}.{number}.record.json")
