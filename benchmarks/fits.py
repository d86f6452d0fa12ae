"""Fits the few figures of device and cluster files to measured runs, and says how far the rest is off.

What is fitted, and from what; no figure belongs to one row or one model:

    efficiencies of a kind of device     its single-device rows
    bytes a second of a class of links   the rows whose time depends on it
    images a second that a host decodes  the rows with records that are slower than everything else explains
    framework bytes, saved factor        all memory figures, by linear least squares
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from benchmarks.published import Row, plan_of

from stagewright.cluster import Cluster, Device, Link
from stagewright.profile import Profile
from stagewright.record import DeviceUse
from stagewright.scheduling import make_schedule
from stagewright.simulation.run import simulate

_MIB = 1 << 20
_MATTERS = 0.02
"""A figure is fitted if halving or doubling it moves a row by this share."""
_PULL = 0.02
"""How much a figure's distance from where it began weighs against an error, both as logarithms."""
_SLOW = 0.05
"""A row with records that is slower than predicted by more than this is taken to be held up by decoding."""


class FittedKind(Protocol):
    """What calibration needs of a kind of device; how it is fitted is the bench's matter."""

    @property
    def name(self) -> str: ...


class _Bench(Protocol):
    """Profiles of a kind of device, which need torch and so come from outside."""

    def kind(self, name: str) -> FittedKind: ...
    def fit(self, kind: FittedKind, rows: Sequence[Row]) -> FittedKind: ...
    def profile(self, kind: FittedKind, row: Row) -> Profile: ...


class Fit(NamedTuple):
    """A cluster and its kind of device after a fit, with what it was fitted from."""

    cluster: Cluster
    kind: FittedKind
    notes: tuple[str, ...]


class Outcome(NamedTuple):
    """A row beside its prediction, and beside the prediction of a fit that has not seen it."""

    row: Row
    step_s: float
    unseen_step_s: float | None
    memory_bytes: tuple[int, int]

    @property
    def error(self) -> float:
        """Of images a second."""
        return self.row.step_s / self.step_s - 1

    @property
    def unseen_error(self) -> float | None:
        """The same, left out of the fit."""
        return None if self.unseen_step_s is None else self.row.step_s / self.unseen_step_s - 1

    @property
    def memory_errors(self) -> tuple[float, ...]:
        """Of the memory figures that the row has."""
        pairs = zip(self.memory_bytes, self.row.memory_bytes)
        return tuple(found / measured - 1 for found, measured in pairs if measured)


# ── predictions ───────────────────────────────────────────────────────────────────────────────────────────────────


class Predictor:
    """Predictions for rows on a cluster that changes; the profiles stay."""

    def __init__(self, bench: _Bench, kind: FittedKind, rows: Iterable[Row], cluster: Cluster) -> None:
        self.profiles = {row.id: bench.profile(kind, row) for row in rows}
        self.schedules = {
            row.id: make_schedule(plan_of(row, self.profiles[row.id], cluster), agree=row.precision == "fp16")
            for row in rows
        }

    def step_s(self, row: Row, cluster: Cluster) -> float:
        """The predicted step."""
        record = simulate(
            self.schedules[row.id], self.profiles[row.id], cluster, data=row.data, num_batches=6, detail=False
        )
        return record.median_step_s

    def num_hosts(self, row: Row) -> int:
        """How many hosts a row's first stage is spread over."""
        return len({id.host for id in self.schedules[row.id].plan.stages[0].devices})

    def memory_parts(self, row: Row, cluster: Cluster, stage: int) -> tuple[int, float]:
        """What a device of a stage holds, beside the framework: what does not depend on rows, and activations."""
        parts = self.device_uses(row, _with_memory(cluster, 0, 1.0))[stage].peak_parts
        return sum(parts.values()) - parts["activations"], float(parts["activations"])

    def memory_bytes(self, row: Row, cluster: Cluster) -> tuple[int, int]:
        """Predicted bytes of a device of the first stage and of the last."""
        uses = self.device_uses(row, cluster)
        return uses[0].peak_bytes, uses[-1].peak_bytes

    def device_uses(self, row: Row, cluster: Cluster) -> list[DeviceUse]:
        """What the first device of every stage did, as a simulation has it."""
        schedule = self.schedules[row.id]
        record = simulate(schedule, self.profiles[row.id], cluster, data=row.data, num_batches=6, detail=False)
        return [record.devices[workers[0]] for workers in schedule.plan.workers]


# ── fits ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def fit_cluster(bench: _Bench, cluster: Cluster, rows: Sequence[Row]) -> Fit:
    """The cluster and its kind of device with all figures that the rows determine."""
    kind = bench.kind(cluster.hosts[0].devices[0].kind)
    singles = [row for row in rows if row.is_single]
    fitted = bench.fit(kind, singles) if singles else kind
    predictor = Predictor(bench, fitted, rows, cluster)
    notes: list[str] = []
    # The narrowest class first: once it explains what is measured, wider ones no longer matter and stay as they are.
    for name in dict.fromkeys(link.kind for link in sorted(cluster.wires, key=lambda link: link.bytes_per_s)):
        cluster, note = _fit_links(predictor, cluster, rows, name)
        notes += note
    cluster, note = _fit_decoding(predictor, cluster, rows)
    cluster = _fit_memory(predictor, cluster, rows)
    return Fit(cluster, fitted, (*notes, *note))


def with_link_rate(cluster: Cluster, kind: str, rate: float) -> Cluster:
    """The cluster with another rate for a class of links."""

    def changed(links: tuple[Link, ...]) -> tuple[Link, ...]:
        return tuple(replace(link, bytes_per_s=rate) if link.kind == kind else link for link in links)

    hosts = tuple(replace(host, links=changed(host.links)) for host in cluster.hosts)
    return replace(cluster, hosts=hosts, links=changed(cluster.links))


def with_decode_rate(cluster: Cluster, rate: float | None) -> Cluster:
    """The cluster with another decode rate on every host; None is no limit."""
    return replace(cluster, hosts=tuple(replace(host, decode_images_per_s=rate) for host in cluster.hosts))


def _fit_links(predictor: Predictor, cluster: Cluster, rows: Sequence[Row], kind: str) -> tuple[Cluster, list[str]]:
    """The cluster with the rate of a class of links fitted, where a row depends on it."""
    start = _rate_of(cluster, kind)
    now = {row.id: predictor.step_s(row, cluster) for row in rows if not row.is_single}
    tried = [with_link_rate(cluster, kind, start * factor) for factor in (0.5, 2.0)]
    moved = [row for row in rows if row.id in now and any(_moves(predictor, row, one, now[row.id]) for one in tried)]
    if not moved:
        return cluster, []
    best = _fit_rate(predictor, moved, start, lambda rate: with_link_rate(cluster, kind, rate))
    return with_link_rate(cluster, kind, best), [f"{kind}: {best:g} bytes/s, fitted to {_names_of(moved)}."]


def _fit_decoding(predictor: Predictor, cluster: Cluster, rows: Sequence[Row]) -> tuple[Cluster, list[str]]:
    """The cluster with the hosts' decode rate fitted to rows that are slower than everything else explains."""
    free = with_decode_rate(cluster, None)
    read = [row for row in rows if row.data == "records"]
    slow = [row for row in read if row.step_s > predictor.step_s(row, free) * (1 + _SLOW)]
    if not slow:
        return cluster, []
    start = max(row.images_per_s / predictor.num_hosts(row) for row in slow)
    best = _fit_rate(predictor, slow, start, lambda rate: with_decode_rate(cluster, rate))
    return with_decode_rate(cluster, best), [f"Decoding: {best:g} images/s a host, fitted to {_names_of(slow)}."]


def _fit_rate(predictor: Predictor, rows: Sequence[Row], start: float, put: Callable[[float], Cluster]) -> float:
    """The rate that minimises Σ (log of predicted / measured)² + PULL² · (log of change)²."""

    def loss(log_rate: float) -> float:
        changed = put(math.exp(log_rate))
        errors = (math.log(predictor.step_s(row, changed) / row.step_s) ** 2 for row in rows)
        return sum(errors) + _PULL**2 * (log_rate - math.log(start)) ** 2

    return float(f"{math.exp(golden(loss, math.log(start / 4), math.log(start * 4))):.3g}")


def _names_of(rows: Sequence[Row]) -> str:
    """`alexnet-dp8, vgg16-dp8`."""
    return ", ".join(row.id for row in rows)


def _moves(predictor: Predictor, row: Row, cluster: Cluster, now_s: float) -> bool:
    """Whether a change of the cluster matters to a row."""
    return abs(predictor.step_s(row, cluster) / now_s - 1) > _MATTERS


def golden(loss: Callable[[float], float], low: float, high: float, rounds: int = 24) -> float:
    """Where a function with one valley is lowest, by golden-section search (Kiefer, 1953)."""
    share = (math.sqrt(5) - 1) / 2
    left, right = high - share * (high - low), low + share * (high - low)
    at_left, at_right = loss(left), loss(right)
    for _ in range(rounds):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - share * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + share * (high - low)
            at_right = loss(right)
    return (low + high) / 2


def _fit_memory(predictor: Predictor, cluster: Cluster, rows: Sequence[Row]) -> Cluster:
    """The cluster with framework bytes and saved factor, by least squares of

    measured = framework + fixed + factor · saved,    each divided by measured: small and large ones count alike
    """
    points = []
    for row in rows:
        for stage, measured in zip((0, len(row.replicas) - 1), row.memory_bytes):
            if measured is not None:
                fixed, saved = predictor.memory_parts(row, cluster, stage)
                points.append((1 / measured, saved / measured, 1 - fixed / measured))
    if len(points) < 2:
        return cluster
    framework, factor = two_unknowns(points)
    if framework < 0 or factor <= 0:
        return cluster

    return _with_memory(cluster, round(framework), float(f"{factor:.3g}"))


def _with_memory(cluster: Cluster, framework_bytes: int, saved_factor: float) -> Cluster:
    """The cluster with these figures on every device."""

    def changed(device: Device) -> Device:
        return replace(device, framework_bytes=framework_bytes, saved_factor=saved_factor)

    hosts = tuple(replace(host, devices=tuple(map(changed, host.devices))) for host in cluster.hosts)
    return replace(cluster, hosts=hosts)


def two_unknowns(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """x and y that minimise Σ (a x + b y − c)²: the normal equations by Cramer's rule."""
    aa, ab, bb = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    ac, bc = (sum(p[i] * p[2] for p in points) for i in (0, 1))
    whole = aa * bb - ab * ab
    if abs(whole) < 1e-12 * aa * bb:
        return 0.0, 0.0
    return (ac * bb - bc * ab) / whole, (aa * bc - ab * ac) / whole


def outcomes(
    bench: _Bench,
    clusters: Mapping[str, Cluster],
    rows: Sequence[Row],
    used: Sequence[Row],
    *,
    leave_one_out: bool = True,
) -> list[Outcome]:
    """Every row beside what a fit of the used rows predicts; used ones also beside a fit of the others."""
    found = []
    for name, cluster in clusters.items():
        mine, known = ([row for row in some if row.cluster == name] for some in (rows, used))
        fit = fit_cluster(bench, cluster, known)
        predictor = Predictor(bench, fit.kind, mine, cluster)
        for row in mine:
            step_s = predictor.step_s(row, fit.cluster)
            unseen_s = unseen_step_s(bench, cluster, known, row) if leave_one_out and row in known else None
            found.append(Outcome(row, step_s, unseen_s, predictor.memory_bytes(row, fit.cluster)))
    return found


def unseen_step_s(bench: _Bench, cluster: Cluster, rows: Sequence[Row], left_out: Row) -> float:
    """What a fit of all other rows predicts for one."""
    fit = fit_cluster(bench, cluster, [row for row in rows if row is not left_out])
    return Predictor(bench, fit.kind, [left_out], cluster).step_s(left_out, fit.cluster)


def unfitted(cluster: Cluster, rates: Mapping[str, float]) -> Cluster:
    """The cluster before any fit: these rates a class of links, decoding without limit, saved factor 1."""
    for kind, rate in rates.items():
        cluster = with_link_rate(cluster, kind, rate)
    hosts = tuple(
        replace(host, devices=tuple(replace(device, saved_factor=1.0) for device in host.devices))
        for host in cluster.hosts
    )
    return with_decode_rate(replace(cluster, hosts=hosts), None)


def keep_unfitted(fitted: Cluster, start: Cluster, original: Cluster) -> Cluster:
    """The fitted cluster, with the original's figures wherever the fit left them as they were at its start."""
    for kind in dict.fromkeys(link.kind for link in original.wires):
        begun, now, own = (_rate_of(cluster, kind) for cluster in (start, fitted, original))
        fitted = with_link_rate(fitted, kind, own if now == begun else now)
    hosts = []
    for host, begun_host, own_host in zip(fitted.hosts, start.hosts, original.hosts):
        is_same = host.decode_images_per_s == begun_host.decode_images_per_s
        decode = own_host.decode_images_per_s if is_same else host.decode_images_per_s
        pairs = zip(host.devices, begun_host.devices, own_host.devices)
        devices = tuple(own if device == begun else device for device, begun, own in pairs)
        hosts.append(replace(host, decode_images_per_s=decode, devices=devices))
    return replace(fitted, hosts=tuple(hosts))


def _rate_of(cluster: Cluster, kind: str) -> float:
    """The rate of a class of links."""
    return next(link.bytes_per_s for link in cluster.wires if link.kind == kind)
