"""Figures as people read them: seconds, bytes, samples a second, ratios."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Protocol

from stagewright.cluster import Cluster, DeviceId, format_devices
from stagewright.record import DeviceUse, Record

GAP = "–"
"""What stands where there is no figure."""


def seconds(value: float) -> str:
    """`149.2 ms`, `3.41 s`, `14 min 13 s`, `2 h 05 min`."""
    if value < 1e-3:
        return f"{value * 1e6:.1f} µs"
    if value < 1:
        return f"{value * 1e3:.1f} ms"
    if value < 60:
        return f"{value:.2f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(value / 60)
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def size(value: float) -> str:
    """`6.9 GiB`, `56.0 MiB`, `812 B`."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{value:.0f} B"


def rate(value: float) -> str:
    """`1,503`, `48.2`, `3.41`: more digits where the figure is small."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


class _HasSamples(Protocol):
    """A profile or a record: what its samples are called, and the tokens that one has."""

    @property
    def sample_name(self) -> str: ...
    @property
    def sample_tokens(self) -> float | None: ...


def rate_unit(of: _HasSamples) -> str:
    """`images/s`, `samples/s`, or `tokens/s` where samples are text."""
    return f"{of.sample_name if of.sample_tokens is None else 'tokens'}/s"


def shared_unit(each: Iterable[_HasSamples]) -> str:
    """The unit that all of them have, or samples/s."""
    units = {rate_unit(one) for one in each}
    return units.pop() if len(units) == 1 else "samples/s"


def amount(samples_per_s: float, of: _HasSamples) -> str:
    """A rate as a number of that unit."""
    return rate(samples_per_s * (of.sample_tokens or 1.0))


def speed(samples_per_s: float, of: _HasSamples) -> str:
    """`1,503 images/s`."""
    return f"{amount(samples_per_s, of)} {rate_unit(of)}"


def times(ratio: float) -> str:
    """`2.1 ×`, never broken over two lines; two digits behind the point where one would hide the difference from 1."""
    return f"{ratio:.1f}\u00a0×" if ratio >= 1.2 else f"{ratio:.2f}\u00a0×"


def percent(share: float) -> str:
    """`+3.1 %`, `−0.4 %`."""
    text = f"{share * 100:+.1f} %".replace("-", "−")
    return text.replace("−0.0", "0.0").replace("+0.0", "0.0")


def span_of(values: Sequence[float]) -> str:
    """`1,466–1,495`, or one figure where they read the same."""
    low, high = rate(min(values)), rate(max(values))
    return low if low == high else f"{low}–{high}"


def row_count(value: float) -> str:
    """`32`, or `26.7` where a batch does not divide evenly."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def alike(record: Record, cluster: Cluster) -> Iterator[tuple[list[DeviceId], DeviceUse]]:
    """Neighbouring devices of the same stages and memory that are about as busy and full, together."""

    def likeness(use: DeviceUse) -> tuple[object, ...]:
        has = cluster.device(DeviceId.parse(use.device)).memory_bytes
        return use.stages, round(use.busy_share, 2), round(use.peak_bytes / 2**30, 1), has, use.peak_bytes > has

    for _, uses in groupby(record.devices, key=likeness):
        members = list(uses)
        yield [DeviceId.parse(use.device) for use in members], members[0]


def too_full(record: Record, cluster: Cluster) -> str:
    """`0:0-7 need 17.1 GiB, and have 11.8 GiB`: the first devices whose memory does not suffice; empty if it does."""
    for ids, use in alike(record, cluster):
        has = cluster.device(ids[0]).memory_bytes
        if use.peak_bytes > has:
            needs, have = ("needs", "has") if len(ids) == 1 else ("need", "have")
            return f"{format_devices(ids)} {needs} {size(use.peak_bytes)}, and {have} {size(has)}"
    return ""
