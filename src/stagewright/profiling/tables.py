"""Figures of others as CSV tables: what layers cost on kinds of device, and what messages take over links.

    layer,device,samples,tensor_parallel,forward_s,backward_s,update_s,weight_bytes,activation_bytes,output_bytes
    block0,a100,4,1,0.0031,0.0062,0.0004,28311552,75497472,3145728

    from,to,bytes,seconds
    0:0,1:0,1048576,0.0011

Cards that compute a layer together are one device: `a100-tp4` for a tensor parallel degree of 4.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from stagewright.cluster import Cluster, Device, DeviceId, Host, Link
from stagewright.errors import ClusterError, ProfileError, StagewrightError
from stagewright.profile import LayerProfile, Precision, Profile
from stagewright.schema import read_text

_Row = Mapping[str, str]
_TIMES = ("forward_s", "backward_s")
_COSTS = ("samples", *_TIMES, "weight_bytes", "activation_bytes", "output_bytes")


def import_profile(path: Path, *, model: str | None = None, precision: Precision = "fp32") -> Profile:
    """The profile in a table of layers, of all the kinds of device in it."""
    kinds: dict[str, dict[str, dict[int, dict[str, float]]]] = {}
    for where, row in _rows(path, ("layer", "device", *_COSTS), ProfileError):
        degree = _number(row, "tensor_parallel", where, ProfileError, 1)
        kind = row["device"] + (f"-tp{degree:g}" if degree > 1 else "")
        figures = {key: _number(row, key, where, ProfileError) for key in _COSTS}
        figures["update_s"] = _number(row, "update_s", where, ProfileError, 0.0)
        samples = int(figures["samples"])
        if samples < 1:
            raise ProfileError(f"{where}: samples is {row['samples']}: expected 1 or more")
        sizes = kinds.setdefault(kind, {}).setdefault(row["layer"], {})
        if samples in sizes:
            raise ProfileError(f"{where}: {row['layer']} on {kind} with {samples} samples stands there twice")
        sizes[samples] = figures
    made = [_of_kind(path, kind, layers, model or path.stem, precision) for kind, layers in kinds.items()]
    return Profile.of_kinds(made)


def _of_kind(
    path: Path, kind: str, layers: Mapping[str, Mapping[int, Mapping[str, float]]], model: str, precision: Precision
) -> Profile:
    sizes = sorted(next(iter(layers.values())))
    for name, found in layers.items():
        if sorted(found) != sizes:
            raise ProfileError(f"{path}: {name} on {kind} has samples {sorted(found)}, where others have {sizes}")
    most, updates = sizes[-1], [found[sizes[-1]]["update_s"] for found in layers.values()]

    def layer(name: str, found: Mapping[int, Mapping[str, float]]) -> LayerProfile:
        last = found[most]
        return LayerProfile(
            name=name, kind="layer", output_bytes=last["output_bytes"] / most,
            saved_bytes=last["activation_bytes"] / most, parameter_bytes=round(last["weight_bytes"]),
            forward_s=tuple(found[size]["forward_s"] for size in sizes),
            backward_s=tuple(found[size]["backward_s"] for size in sizes),
        )  # fmt: skip

    return Profile(
        model=model, device=kind, precision=precision, source="imported", batch_sizes=tuple(sizes),
        layers=tuple(layer(name, found) for name, found in layers.items()), optimizer_s=sum(updates),
        notes=(f"imported from {path.name}",),
    )  # fmt: skip


def import_links(path: Path, device: Device, *, name: str | None = None) -> Cluster:
    """The cluster of a table of messages between devices: each pair's wire has a latency and a rate that fit them."""
    pairs: dict[tuple[DeviceId, DeviceId], list[tuple[float, float]]] = {}
    for where, row in _rows(path, ("from", "to", "bytes", "seconds"), ClusterError):
        ends = (DeviceId.parse(row["from"]), DeviceId.parse(row["to"]))
        if ends[0] == ends[1]:
            raise ClusterError(f"{where}: a message from {row['from']} to itself")
        figures = [_number(row, key, where, ClusterError) for key in ("bytes", "seconds")]
        pairs.setdefault(ends, []).append((figures[0], figures[1]))
    hosts = _numbers(path, {id for ends in pairs for id in ends})
    inside: list[list[Link]] = [[] for _ in hosts]
    outside: list[Link] = []
    for (source, target), there in pairs.items():
        back = pairs.get((target, source))
        if back is not None and target < source:
            continue  # the same wire, the other way
        (rate, latency_s), same = _fit(there), source.host == target.host
        link = Link(
            ends=(str(source.device), str(target.device)) if same else (str(source), str(target)), kind="measured",
            bytes_per_s=rate, latency_s=latency_s, back_bytes_per_s=None if back is None else _fit(back)[0],
        )  # fmt: skip
        (inside[source.host] if same else outside).append(link)
    note = f"links imported from {path.name}: latency and rate of each pair fitted to its messages"
    return Cluster(
        name=name or path.stem, links=tuple(outside), notes=(note,),
        hosts=tuple(Host(devices=(device,) * most, links=tuple(links)) for most, links in zip(hosts, inside)),
    )  # fmt: skip


def _numbers(path: Path, ids: set[DeviceId]) -> list[int]:
    """How many devices each host has: all that their numbers ask for."""
    counts = Counter(id.host for id in ids)
    expected = {DeviceId(host, device) for host, count in counts.items() for device in range(count)}
    lost = sorted(expected - ids) or [DeviceId(host, 0) for host in range(len(counts)) if host not in counts]
    if lost:
        raise ClusterError(f"{path}: no message names {lost[0]}", "number hosts and devices from 0 on: 0:0, 0:1, 1:0")
    return [counts[host] for host in range(len(counts))]


def _fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Bytes a second and latency: the line through the largest and the smallest message; one alone has no latency."""
    (least, least_s), (most, most_s) = min(points), max(points)
    if most == least or most_s <= least_s:
        return most / most_s, 0.0
    rate = (most - least) / (most_s - least_s)
    return rate, max(least_s - least / rate, 0.0)


def _rows(path: Path, needed: Sequence[str], error: type[StagewrightError]) -> Iterator[tuple[str, _Row]]:
    """Every row of a table, with where it stands."""
    table = csv.DictReader(read_text(path).removeprefix("\ufeff").splitlines())
    if lost := [key for key in needed if key not in (table.fieldnames or ())]:
        raise error(f"{path}: column {lost[0]} is missing", f"the columns are {', '.join(needed)}")
    empty = True
    for row in table:
        empty = False
        where = f"{path}, line {table.line_num}"
        if None in row or None in row.values():
            raise error(f"{where}: {len(table.fieldnames or ())} values expected, as the first line has")
        yield where, {key: value.strip() for key, value in row.items()}
    if empty:
        raise error(f"{path}: holds no row")


def _number(row: _Row, key: str, where: str, error: type[StagewrightError], otherwise: float | None = None) -> float:
    text = row.get(key, "")
    if not text and otherwise is not None:
        return otherwise
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or (key in ("bytes", "seconds") and not value):
        raise error(f"{where}: {key} is {text!r}: expected a number, not below zero")
    return value
