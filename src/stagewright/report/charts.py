"""What the page's charts show, as plain values; how they look is the page's own business."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from stagewright.record import MEMORY_KINDS, DeviceUse, Point, Record, Span
from stagewright.report.cases import WHERE_TIME_GOES, Case, strategy
from stagewright.report.comparison import Pair, families, family_title, find_base
from stagewright.report.figures import rate, seconds, size, span_of, times
from stagewright.report.timeline import (
    FAMILIES,
    NUM_COMMUNICATION_LANES,
    WORDS,
    action_text,
    busy_shares,
    family_of,
    lanes,
    one_step,
    row_names,
    thin,
    whole,
)

_Plain = dict[str, Any]

_OTHER = "not told apart"
"""Memory that a record does not divide by kind."""


def chart_data(cases: Sequence[Case], pairs: Sequence[Pair]) -> _Plain:
    """Everything that the charts draw, family by family, so that no chart mixes models, data or precisions."""
    groups = [_family_charts(family) for family in families(cases)]
    return {
        "families": groups,
        "curves": [chart for family in families(cases) for chart in _curve_charts(family)],
        "errors": [_error_bar(pair) for pair in pairs],
        "memory_kinds": [*MEMORY_KINDS, _OTHER],
        "span_families": [[family.name, family.colour] for family in FAMILIES],
        "words": dict(WORDS),
        "num_lanes": NUM_COMMUNICATION_LANES,
    }


def _family_charts(family: Sequence[Case]) -> _Plain:
    """The bars and lines of the cases of one model, data and precision."""
    batches = {case.plan.batch for case in family}
    return {
        "title": family_title(family),
        "same_batch": len(batches) == 1,
        "throughput": [_throughput_bar(case, len(batches) > 1) for case in family],
        "speedup": _speedup_lines(family),
        "memory": [bar for case in family for bar in _memory_bars(case)],
    }


def _throughput_bar(case: Case, tell_batch: bool) -> _Plain:
    """A bar with its spread, its limit, and the words for both."""
    limit = case.limit_samples_per_s
    told = f"{case.speed(limit)} if the busiest device never waited" if limit else ""
    return {
        "name": case.name + (f" · batch {case.plan.batch:,}" if tell_batch else ""),
        "source": case.source,
        "value": case.samples_per_s,
        "text": rate(case.samples_per_s),
        "spread": f"{span_of(case.rates)} in {len(case.records)} runs" if len(case.records) > 1 else "one run",
        "limit": limit,
        "limit_text": told,
        "limited_by": case.record.limit,
        "low": min(case.rates),
        "high": max(case.rates),
    }


def _speedup_lines(family: Sequence[Case]) -> list[_Plain]:
    """A line for each type and source, over the number of devices; none where all cases have as many."""
    bases = [(case, find_base(case, family)) for case in sorted(family, key=lambda case: case.num_devices)]
    smallest = min(case.num_devices for case in family)
    found: dict[tuple[str, str], list[_Plain]] = {}
    for case, base in bases:
        # One ideal line holds for all points only if their bases have as many devices.
        if base is not None and base.num_devices == smallest:
            told = "data parallel" if strategy(case.plan) == "one device" else strategy(case.plan)
            found.setdefault((told, case.source), []).append(_speedup_point(case, base))
    if len({point["devices"] for points in found.values() for point in points}) < 2:
        return []
    return [{"type": told, "source": source, "points": points} for (told, source), points in found.items()]


def _speedup_point(case: Case, base: Case) -> _Plain:
    """Devices, speedup, and what a perfect one would be: as many times as the base has devices."""
    ratio = case.samples_per_s / base.samples_per_s
    return {
        "devices": case.num_devices,
        "value": ratio,
        "ideal": case.num_devices / base.num_devices,
        "name": case.name,
        "text": f"{times(ratio)} against {base.name}, on {case.num_devices} devices, batch {case.plan.batch:,}",
    }


def _memory_bars(case: Case) -> list[_Plain]:
    """The fullest device of the first and of the last stage, by kind."""
    stages = sorted({0, len(case.plan.stages) - 1})
    found = ((stage, case.stage_uses[stage]) for stage in stages)
    return [
        {
            "name": case.name + (f" · stage {stage}" if len(stages) > 1 else ""),
            "source": case.source,
            "device": use.device,
            "text": size(use.peak_bytes),
            "parts": _parts_of(use),
        }
        for stage, use in found
        if use is not None
    ]


def _parts_of(use: DeviceUse) -> dict[str, int]:
    """The peak by kind; what the kinds leave over, beyond rounding, is shown as such."""
    parts = {kind: use.peak_parts[kind] for kind in MEMORY_KINDS if use.peak_parts.get(kind)}
    rest = use.peak_bytes - sum(parts.values())
    return {**parts, _OTHER: rest} if rest > use.peak_bytes / 200 else parts


def _curve_charts(family: Sequence[Case]) -> list[_Plain]:
    """A chart for each curve (loss, top1 …) with a line a case."""
    names = dict.fromkeys(point.name for case in family for point in case.record.points)
    return [
        {
            "title": f"{name} · {family_title(family)}",
            "lines": [
                {"name": case.name, "source": case.source, "batch": case.plan.batch, "points": curve(case.record, name)}
                for case in family
                if any(point.name == name for point in case.record.points)
            ],
        }
        for name in names
    ]


def curve(record: Record, name: str) -> list[list[float]]:
    """Step, value and epoch along one curve, evenly thinned, its last point kept."""
    points: list[Point] = [point for point in record.points if point.name == name]
    stride = _stride(len(points))
    kept = [*points[:-1:stride], points[-1]]
    return [[point.step, point.value, point.epoch] for point in kept]


def _stride(number: int) -> int:
    """Every which point is drawn: more than 600 are more than a screen has columns for."""
    return -(-number // 600)


def _error_bar(pair: Pair) -> _Plain:
    """A prediction's errors in percent, of throughput and of peak memory."""
    memory = pair.memory_error
    return {
        "name": pair.found.name + ("" if pair.same_cluster else " (other cluster)"),
        "source": pair.found.source,
        "rate": pair.rate_error * 100,
        "memory": None if memory is None else memory * 100,
        "text": f"{pair.found.speed(pair.predicted.samples_per_s)} predicted, {pair.found.speed()} found",
    }


def run_data(case: Case, limit: int) -> _Plain:
    """One run's timeline and memory; times in microseconds from its first span."""
    record = case.record
    spans = thin(record.spans, limit)
    start_s = whole(spans).start_s if spans else 0.0
    window = one_step(spans) if spans else None
    return {
        "rows": list(row_names(record)),
        "devices": [str(device) for device in record.plan.devices],
        "stages": [[str(device) for device in stage.devices] for stage in record.plan.stages],
        "busy": list(busy_shares(record)),
        "several": record.plan.num_microbatches > 1,
        "notes": [note for note in record.notes if note.startswith(WHERE_TIME_GOES)],
        "num_left_out": len(record.spans) - len(spans),
        "window": [_micro(edge - start_s) for edge in window] if window else None,
        "spans": _span_groups(spans, start_s),
        "memory": _memory_curves((use for use in record.devices if use.memory_s), start_s),
    }


def _micro(value_s: float) -> float:
    """Microseconds, to a hundredth: shorter to write, and no reader sees more."""
    return round(value_s * 1e6, 2)


def _span_groups(spans: Sequence[Span], start_s: float) -> _Plain:
    """Spans column by column, those of workers that did the same at the same time once; the page writes them out."""
    families_by_name = [family.name for family in FAMILIES]
    kinds = sorted({span.kind for span in spans})
    texts = list(dict.fromkeys(map(action_text, spans)))
    number_of = {text: number for number, text in enumerate(texts)}
    rows: dict[int, list[tuple[float, ...]]] = {}
    for span, lane in zip(spans, lanes(spans)):
        times = _micro(span.start_s - start_s), _micro(span.stop_s - span.start_s)
        text = number_of[action_text(span)]
        rows.setdefault(span.worker, []).append((kinds.index(span.kind), lane, span.batch, text, *times))
    alike: dict[tuple[tuple[float, ...], ...], list[int]] = {}
    for worker, own in rows.items():
        alike.setdefault(tuple(own), []).append(worker)
    names = ("kind", "lane", "batch", "text", "start", "length")
    groups = ({"workers": workers, **dict(zip(names, map(list, zip(*own))))} for own, workers in alike.items())
    return {
        "kinds": kinds,
        "families": [families_by_name.index(family_of(kind).name) for kind in kinds],
        "texts": texts,
        "groups": list(groups),
    }


def _memory_curves(uses: Iterable[DeviceUse], start_s: float) -> list[_Plain]:
    """Memory over time by kind; devices with the same curve share it."""
    alike: dict[str, _Plain] = {}
    for use in uses:
        curve = _memory_curve(use, start_s)
        alike.setdefault(json.dumps(curve), {"devices": [], **curve})["devices"].append(use.device)
    return list(alike.values())


def _memory_curve(use: DeviceUse, start_s: float) -> _Plain:
    """A device's memory over time, thinned so that the highest moment of each stretch stays; one number where a kind
    never changes.
    """
    kinds = [kind for kind in MEMORY_KINDS if kind in use.memory_parts]
    totals = [sum(use.memory_parts[kind][index] for kind in kinds) for index in range(len(use.memory_s))]
    stride = _stride(len(totals))
    stretches = (range(first, min(first + stride, len(totals))) for first in range(0, len(totals), stride))
    kept = [max(stretch, key=totals.__getitem__) for stretch in stretches]
    parts = {kind: [use.memory_parts[kind][index] for index in kept] for kind in kinds}
    peak = f"{size(max(totals))} at {seconds(use.memory_s[totals.index(max(totals))] - start_s)}" if totals else ""
    return {
        "time": [_micro(use.memory_s[index] - start_s) for index in kept],
        "parts": {kind: part[0] if len(set(part)) == 1 else part for kind, part in parts.items()},
        "peak": peak,
    }


def span_limit(cases: Sequence[Case]) -> int:
    """How many spans of each run the page carries: more than 20,000, or 200,000 in all, make it slow to open."""
    drawn = sum(1 for case in cases if case.record.spans)
    return max(min(20_000, 200_000 // max(drawn, 1)), 1_000)
