"""Small clusters to emulate."""

from __future__ import annotations

from stagewright.cluster import Cluster, Device, Host, Link


def star(*rates: float, shares: tuple[float | None, ...] | None = None, latency_s: float = 0.0) -> Cluster:
    """Hosts with these rates in bytes/s, each linked to one switch."""
    hosts = tuple(
        Host(
            devices=(Device(kind="cpu", memory_bytes=1 << 30),),
            links=(Link(ends=("0", "nic"), kind="local", bytes_per_s=1e12),),
            cpu_share=share,
        )
        for share in shares or (None,) * len(rates)
    )
    links = tuple(
        Link(ends=(f"{number}:nic", "net"), kind="NET", bytes_per_s=rate, latency_s=latency_s)
        for number, rate in enumerate(rates)
    )
    return Cluster(name="star", hosts=hosts, links=links)
