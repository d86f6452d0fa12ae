"""Measured runs of others, one a row of a CSV file, and the plans they ran."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from stagewright.cluster import Cluster
from stagewright.cost import num_buckets
from stagewright.errors import DataError, FileError
from stagewright.plan import Plan, Stage
from stagewright.profile import Precision, Profile

_MIB = 1 << 20
_MODEL_NAMES: Mapping[str, str] = {"resnet50-v1.5": "resnet50"}
"""Models that others call by another name."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured run."""

    id: str
    cluster: str
    model: str
    replicas: tuple[int, ...]
    versions: tuple[int, ...]
    cut: str
    batch_per_device: int
    precision: Precision
    data: str
    step_s: float
    memory_bytes: tuple[int | None, int | None]
    """Of a device of the first stage and of the last."""

    @property
    def images(self) -> int:
        """Rows of one step."""
        return self.batch_per_device * self.replicas[0]

    @property
    def images_per_s(self) -> float:
        """Of the whole run."""
        return self.images / self.step_s

    @property
    def is_single(self) -> bool:
        """Whether it ran on one device."""
        return self.replicas == (1,)


def read_rows(path: Path) -> tuple[Row, ...]:
    """The rows of a CSV file; a fault is named with its line and column."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
    except OSError as fault:
        raise FileError(f"{path}: {fault.strerror}", "give a CSV file of measured runs, one a row") from None
    except (UnicodeDecodeError, csv.Error) as fault:
        raise FileError(f"{path}: cannot be read as CSV: {fault}") from None
    if not lines:
        raise DataError(f"{path}: holds no rows")
    return tuple(_parse_row(line, f"{path}, line {number}") for number, line in enumerate(lines, start=2))


def _parse_row(line: Mapping[str, str | None], where: str) -> Row:
    """One line of the file."""

    def field(key: str) -> str:
        value = line.get(key)
        if value is None:
            raise DataError(f"{where}: column {key} is missing")
        return value.strip()

    def number(key: str) -> float:
        text = field(key)
        if not re.fullmatch(r"\d{1,12}(\.\d{1,12})?", text, re.ASCII) or float(text) == 0:
            raise DataError(f"{where}: column {key} is {text!r}: expected a positive number")
        return float(text)

    def counts(key: str) -> tuple[int, ...]:
        text = field(key)
        if not re.fullmatch(r"[1-9]\d{0,5}(-[1-9]\d{0,5})*", text, re.ASCII):
            raise DataError(f"{where}: column {key} is {text!r}: expected numbers such as 7-1")
        return tuple(map(int, text.split("-")))

    def memory(key: str) -> int | None:
        return round(number(key) * _MIB) if field(key) else None

    precision = field("precision")
    if precision not in ("fp32", "fp16", "bf16"):
        raise DataError(f"{where}: column precision is {precision!r}: expected fp32, fp16 or bf16")
    replicas, versions = counts("stage_devices"), counts("weight_versions")
    return Row(
        id=field("id"),
        cluster=field("cluster"),
        model=_MODEL_NAMES.get(field("model"), field("model")),
        replicas=replicas,
        versions=versions if len(versions) == len(replicas) else versions * len(replicas),
        cut=field("cut_share"),
        batch_per_device=int(number("batch_per_device")),
        precision=cast(Precision, precision),
        data=field("data"),
        step_s=number("step_s"),
        memory_bytes=(memory("memory_mib_first_stage"), memory("memory_mib_last_stage")),
    )


def find_cut(text: str, names: Sequence[str], where: str) -> int:
    """The layer that a text such as `cut near conv5_2` names."""
    words = set(re.findall(r"[\w.]+", text))
    found = [index for index, name in enumerate(names) if name in words]
    if not found:
        raise DataError(f"row {where}: cut_share is {text!r}, which names no layer of the model")
    return found[0]


def plan_of(row: Row, profile: Profile, cluster: Cluster) -> Plan:
    """How the row ran; batches of a run without flush hardly overlapped across the cut, so one is held at a time."""
    names, edges = profile.names, [0]
    if len(row.replicas) > 1:
        edges.append(find_cut(row.cut, names, row.id))
    edges.append(len(names))
    stages, first, ids = [], 0, cluster.device_ids
    for number, count in enumerate(row.replicas):
        low, high = edges[number], edges[number + 1]
        num_bytes = sum(layer.parameter_bytes for layer in profile.layers[low:high])
        stages.append(
            Stage(
                layers=names[low:high],
                devices=ids[first : first + count],
                versions=row.versions[number],
                num_buckets=num_buckets(num_bytes) if count > 1 else 1,
            )
        )
        first += count
    stale = any(versions > 1 for versions in row.versions)
    return Plan(model=row.model, stages=tuple(stages), batch=row.images, hold=1 if stale else None)
