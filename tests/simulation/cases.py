"""Small models, clusters and plans whose times can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.cluster import Cluster, Device, DeviceId, Host, Link, make_cluster
from stagewright.plan import Plan, Policy, Route, Stage
from stagewright.profile import LayerProfile, Profile
from stagewright.scheduling import make_schedule
from stagewright.simulation.engine import Engine
from stagewright.simulation.log import Log
from stagewright.simulation.program import Program, make_program
from stagewright.simulation.traffic import Traffic

FREE = 1e30
"""Bytes a second of a link that costs nothing."""


def layer(name: str, forward_s: float = 1.0, backward_s: float = 2.0, **others: float) -> LayerProfile:
    """A layer that takes these seconds for each row."""
    figures = {"output_bytes": 0.0, "saved_bytes": 0.0, "parameter_bytes": 0, "weight_share": 0.5, **others}
    return LayerProfile(name=name, forward_s=(forward_s,), backward_s=(backward_s,), **figures)


def profile(*layers: LayerProfile, optimizer_s: float = 0.0) -> Profile:
    """A model of these layers."""
    return Profile(
        model="m", device="cpu", source="analytic", batch_sizes=(1,), layers=tuple(layers), optimizer_s=optimizer_s
    )


def even_profile(num_layers: int, **others: float) -> Profile:
    """Equal layers: forward 1 s a row, backward 2 s."""
    return profile(*(layer(f"l{number}", **others) for number in range(num_layers)))


def plan(
    replicas: Sequence[int],
    num_microbatches: int = 1,
    *,
    batch: int | None = None,
    versions: Sequence[int] | None = None,
    policy: Policy = "1f1b",
    route: Route = "split",
    num_buckets: int = 1,
    hold: int | None = None,
    recompute: bool = False,
) -> Plan:
    """Stage n has the layer `ln`; devices are given out one after the other."""
    first, stages = 0, []
    for number, count in enumerate(replicas):
        stages.append(
            Stage(
                layers=(f"l{number}",),
                devices=tuple(DeviceId(0, first + index) for index in range(count)),
                versions=versions[number] if versions else 1,
                num_buckets=num_buckets,
                recompute=recompute,
            )
        )
        first += count
    return Plan(
        model="m",
        stages=tuple(stages),
        batch=batch or num_microbatches * max(replicas),
        num_microbatches=num_microbatches,
        policy=policy,
        route=route,
        hold=hold,
    )


def run(made: Plan, figures: Profile, cluster: Cluster | None = None, num_batches: int = 1) -> tuple[Program, Log]:
    """The plan's schedule, carried out."""
    program = make_program(make_schedule(made), figures, cluster or make_cluster(len(made.devices), bytes_per_s=FREE))
    return program, Engine(program, num_batches).run()


def length(log: Log) -> float:
    """When the last worker is done."""
    return max(entries[-1].stop_s for entries in log.done)


def used(traffic: Traffic) -> list[float]:
    """Bytes a second on each directed link now."""
    found = [0.0] * len(traffic.rates)
    for flow in traffic.flows:
        for link, edges in flow.loads:
            found[link] += flow.rate * edges
    return found


def star(*rates: float, latency_s: float = 0.0) -> Cluster:
    """Devices with these rates around one hub."""
    device = Device(kind="cpu", memory_bytes=1 << 40)
    links = (
        Link(ends=(str(n), "hub"), kind="local", bytes_per_s=rate, latency_s=latency_s) for n, rate in enumerate(rates)
    )
    return Cluster(name="star", hosts=(Host(devices=(device,) * len(rates), links=tuple(links)),))
