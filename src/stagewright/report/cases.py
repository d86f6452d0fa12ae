"""Records as cases: one setting, all its repetitions; which of them may stand side by side, and what one is to another.

A folder of results is read at any depth:

    out/
      cluster.yaml                  the hardware, for the drawing (also NAME.cluster.yaml)
      vgg16-7-1.1.record.json       ┐ one case, two repetitions: the same name inside, files that differ
      vgg16-7-1.2.record.json       ┘
      vgg16-7-1.1.log               shown as the log of the record beside it (also .zip)
      vgg16-dp.failure.json         a case that gave no record, with its reason
      tiny/record.json              what `train -o out/tiny` leaves: a case of its own, called tiny
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import ClassVar, NamedTuple

from stagewright.cluster import Cluster
from stagewright.errors import FileError, RecordError, StagewrightError, UsageError
from stagewright.plan import Plan, parse_staleness
from stagewright.record import DeviceUse, Record, Source
from stagewright.report.figures import row_count, speed
from stagewright.schema import Saved, schema

RECORD_END, FAILURE_END = ".record.json", ".failure.json"
_RUN_RECORD = "record.json"
"""What a run leaves in its own folder."""
SOURCES: tuple[Source, ...] = ("measured", "rehearsed", "simulated")
"""The strongest evidence first."""
_WHERE_TIME_GOES = ("critical path:", "reduce among ")
"""How a simulation's notes begin that explain its timeline."""


@schema(error=RecordError)
class Failure(Saved):
    """A case that gave no record, and why."""

    FORMAT: ClassVar[str] = "stagewright.failure"
    ERROR: ClassVar[type[StagewrightError]] = RecordError

    name: str
    reason: str
    model: str = ""
    placement: str = ""
    source: Source = "measured"
    """What the case was to be."""
    command: str = ""


class _Workload(NamedTuple):
    """What one step does; figures of different workloads do not compare."""

    model: str
    rows: int
    data: str
    precision: str

    def __str__(self) -> str:
        return f"{self.model}, {self.rows:,} samples a step, {self.data} data, {self.precision}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting and its repetitions, which all did the same work under the same plan."""

    records: tuple[Record, ...]
    files: tuple[Path | None, ...]

    @cached_property
    def record(self) -> Record:
        """The repetition in the middle, which stands for the case in drawings."""
        ranked = sorted(self.records, key=lambda record: record.samples_per_s)
        return ranked[(len(ranked) - 1) // 2]

    @property
    def name(self) -> str:
        """The case's name."""
        return self.records[0].name

    @property
    def plan(self) -> Plan:
        """The plan that all repetitions ran."""
        return self.records[0].plan

    @property
    def source(self) -> Source:
        """Simulated, rehearsed or measured."""
        return self.records[0].source

    @cached_property
    def workload(self) -> _Workload:
        """What each of its steps does."""
        record = self.records[0]
        return _Workload(record.plan.model, record.step_samples, record.data, record.precision)

    @cached_property
    def rates(self) -> tuple[float, ...]:
        """Samples a second of each repetition, in the order in which they ran."""
        return tuple(record.samples_per_s for record in self.records)

    @property
    def samples_per_s(self) -> float:
        """The median of the repetitions."""
        return median(self.rates)

    def gain(self, other: Case) -> float:
        """How many times as fast it is as another case."""
        return self.samples_per_s / other.samples_per_s

    def speed(self, samples_per_s: float | None = None) -> str:
        """`1,488 images/s`, its own or others beside it."""
        return speed(self.samples_per_s if samples_per_s is None else samples_per_s, self.record)

    @property
    def step_s(self) -> float:
        """The median step of the repetitions."""
        return median(record.median_step_s for record in self.records)

    @property
    def num_devices(self) -> int:
        """How many devices the plan uses."""
        return len(self.plan.devices)

    @property
    def rows_per_device(self) -> float:
        """The rows of one replica of the first stage."""
        return self.plan.batch / self.plan.replicas[0]

    @cached_property
    def stage_uses(self) -> tuple[DeviceUse | None, ...]:
        """For each stage the device that held most, over all repetitions."""
        uses = [use for record in self.records for use in record.devices]
        stages = range(len(self.plan.stages))
        found = ([use for use in uses if stage in use.stages] for stage in stages)
        return tuple(max(those, key=lambda use: use.peak_bytes, default=None) for those in found)

    @property
    def outer_uses(self) -> tuple[DeviceUse | None, ...]:
        """What the fullest devices of the first and the last stage held; one where there is one stage."""
        return (self.stage_uses[0], self.stage_uses[-1])[: len(self.plan.stages)]

    @property
    def peak_bytes(self) -> int:
        """The largest peak of a device; 0 where none was watched."""
        return max((use.peak_bytes for use in self.stage_uses if use is not None), default=0)

    @property
    def limit_samples_per_s(self) -> float | None:
        """Samples a second if the busiest device never waited; None where no device was watched."""
        share = min(max((use.busy_share for use in self.record.devices), default=0.0), 1.0)
        return self.samples_per_s / share if share > 0 else None

    def notes(self, *, on_time: bool) -> tuple[str, ...]:
        """The notes of its record that say where time goes in its timeline, or those that must be read with figures."""
        return tuple(note for note in self.record.notes if note.startswith(_WHERE_TIME_GOES) == on_time)

    @property
    def log(self) -> Path | None:
        """The log or archive beside the file of its record, or that file itself."""
        file = self.files[self.records.index(self.record)]
        if file is None:
            return None
        stem = file.name.removesuffix(RECORD_END)
        names = ("events.jsonl",) if file.name == _RUN_RECORD else (stem + ".log", stem + ".zip")
        beside = (file.with_name(name) for name in names)
        return next((path for path in beside if path.is_file()), file)


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a report is made from."""

    cases: tuple[Case, ...]
    failures: tuple[Failure, ...] = ()
    clusters: tuple[Cluster, ...] = ()


def make_cases(records: Iterable[Record], files: Iterable[Path | None] = ()) -> tuple[Case, ...]:
    """Cases of one workload and then of one name together, the strongest evidence first; else as they come.

    What differs in name, source, plan or workload is another case; a record without a step is of no case.
    """
    groups: dict[object, Case] = {}
    for record, file in zip_longest(records, files):
        if record.step_s:
            one = Case(records=(record,), files=(file,))
            key = (one.name, one.source, record.cluster, plan_key(one.plan), one.workload, record.epoch_samples)
            before = groups.get(key, Case(records=(), files=()))
            groups[key] = Case(records=before.records + one.records, files=before.files + one.files)
    cases = groups.values()
    kinds = list(dict.fromkeys(case.workload._replace(rows=0) for case in cases))
    names = list(dict.fromkeys(case.name for case in cases))

    def rank(case: Case) -> tuple[int, int, int]:
        return kinds.index(case.workload._replace(rows=0)), names.index(case.name), SOURCES.index(case.source)

    return tuple(sorted(cases, key=rank))


def plan_key(plan: Plan) -> object:
    """What a plan does, without the notes on why it was chosen."""
    return plan.stages, plan.num_microbatches, plan.route, plan.policy, plan.hold


def strategy(plan: Plan) -> str:
    """The plan's type, in the words of the tables: `one device`, `data parallel`, `pipeline`, `ssp` …"""
    if len(plan.stages) == 1 and plan.is_synchronous:
        return "one device" if len(plan.devices) == 1 else "data parallel"
    if plan.is_synchronous:
        return "pipeline"
    for name in ("ssp", "2bw"):
        if plan.versions == parse_staleness(name, len(plan.stages)):
            return name
    return "stale " + ",".join(map(str, plan.versions))


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────


def read_results(folder: Path, clusters: Sequence[Cluster] = ()) -> Results:
    """Every record, failure and cluster file under a folder."""
    if not folder.is_dir():
        raise FileError(
            f"{folder}: no such folder", "give the folder that `stagewright train` or `bench` wrote to with -o"
        )
    records = _read_records(folder)
    failures = [Failure.load(file) for file in _found(folder, f"*{FAILURE_END}")]
    if not records and not failures:
        raise UsageError(
            f"{folder} holds no {_RUN_RECORD}, no *{RECORD_END} and no *{FAILURE_END}",
            "run `stagewright train … -o DIR` or `stagewright bench SUITE -o DIR`",
        )
    failures += (
        Failure(
            name=record.name, reason="it was resumed after its last step: nothing was trained",
            model=record.plan.model, placement=record.plan.placement, source=record.source, command=record.command,
        )
        for record in records.values() if not record.step_s
    )  # fmt: skip
    found = sorted([*folder.rglob("cluster.yaml"), *folder.rglob("*.cluster.yaml")])
    return Results(
        cases=make_cases(records.values(), records), failures=tuple(failures),
        clusters=(*clusters, *map(Cluster.load, found)),
    )  # fmt: skip


def _read_records(folder: Path) -> dict[Path, Record]:
    """The records under a folder, by file; one that a run left in its own folder is called by that folder.

    A record that was saved again under a name counts once: no two runs take the same time to the last digit.
    """

    def run_of(record: Record) -> object:
        return record.source, plan_key(record.plan), record.step_s

    found = {file: Record.load(file) for file in _found(folder, f"*{RECORD_END}")}
    seen = set(map(run_of, found.values()))
    for file in _found(folder, _RUN_RECORD):
        record, home = Record.load(file), file.parent
        if run_of(record) not in seen:
            name = home.resolve().name if home == folder else home.relative_to(folder).as_posix()
            found[file] = replace(record, name=name)
            seen.add(run_of(record))
    return found


def _found(folder: Path, pattern: str) -> list[Path]:
    """The files under a folder, sorted so that 8 comes before 16."""

    def natural(path: Path) -> list[tuple[int, str]]:
        parts = re.findall(r"\d+|\D+", str(path))
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

    return sorted(folder.rglob(pattern), key=natural)


# ── side by side ────────────────────────────────────────────────────────────────────────────────────────


def families(cases: Sequence[Case]) -> tuple[tuple[Case, ...], ...]:
    """Cases of the same model, data and precision together: their samples are alike, their batches may differ."""
    groups: dict[object, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.workload._replace(rows=0), []).append(case)
    return tuple(map(tuple, groups.values()))


def differences(case: Case, other: Case) -> tuple[str, ...]:
    """What makes the work of two cases differ, in words; nothing for the same work on the same cluster.

    `('batch 224 against 256', 'cluster a against b')`
    """
    one, two = case.workload, other.workload
    pairs = (
        ("model", one.model, two.model), ("batch", f"{one.rows:,}", f"{two.rows:,}"), ("data", one.data, two.data),
        ("precision", one.precision, two.precision), ("cluster", case.record.cluster, other.record.cluster),
    )  # fmt: skip
    rows = case.rows_per_device
    each = f", both {row_count(rows)} a device" if rows == other.rows_per_device else ""
    told = (f"{word} {mine} against {yours}{each * (word == 'batch')}" for word, mine, yours in pairs if mine != yours)
    return tuple(told)


def find_base(case: Case, family: Sequence[Case]) -> Case | None:
    """What a case's speedup is told against: same source, fewest devices, then same cluster and plainest type."""
    others = [other for other in family if other.source == case.source]

    def rank(other: Case) -> tuple[int, int, bool, bool]:
        plain = strategy(other.plan) in ("one device", "data parallel")
        return other.num_devices, len(differences(case, other)), not plain, other is not case

    best = min(others, key=rank, default=None)
    return None if best is case and len(others) == 1 else best


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A prediction and what came of it, of one plan or one name, doing the same work."""

    predicted: Case
    found: Case

    @property
    def rate_error(self) -> float:
        """(predicted − found) / found, of samples a second."""
        return self.predicted.gain(self.found) - 1

    @property
    def memory_error(self) -> float | None:
        """The same of the largest peak of a device."""
        predicted, found = self.predicted.peak_bytes, self.found.peak_bytes
        return predicted / found - 1 if predicted and found else None

    @property
    def same_cluster(self) -> bool:
        """Whether the prediction was made for the cluster that it is held against."""
        return self.predicted.record.cluster == self.found.record.cluster


def find_prediction(case: Case, cases: Sequence[Case]) -> Case | None:
    """The simulation of a case's plan and workload; failing that, the one of its name and workload."""
    if case.source == "simulated":
        return None
    simulated = [other for other in cases if other.source == "simulated" and other.workload == case.workload]
    alike = [other for other in simulated if plan_key(other.plan) == plan_key(case.plan)]
    named = [other for other in simulated if other.name == case.name]
    # The same plan on another cluster is a worse match than the same one on the same cluster.
    ranked = sorted(alike or named, key=lambda other: (other.record.cluster != case.record.cluster, other not in named))
    return ranked[0] if ranked else None


def find_pairs(cases: Sequence[Case]) -> tuple[Pair, ...]:
    """Every rehearsed or measured case with its prediction, where there is one."""
    found = ((case, find_prediction(case, cases)) for case in cases)
    return tuple(Pair(predicted=predicted, found=case) for case, predicted in found if predicted is not None)
