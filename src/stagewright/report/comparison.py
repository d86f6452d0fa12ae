"""Which cases may stand side by side, what differs between them, and what one is against another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagewright.report.cases import Case, Work, plan_key, strategy, work_key
from stagewright.report.figures import rows_of


def families(cases: Sequence[Case]) -> tuple[tuple[Case, ...], ...]:
    """Cases of the same model, data and precision together: their samples are alike, their batches may differ."""
    groups: dict[object, list[Case]] = {}
    for case in cases:
        groups.setdefault(work_key(case.record)._replace(rows=0), []).append(case)
    return tuple(map(tuple, groups.values()))


def family_title(family: Sequence[Case]) -> str:
    """`VGG16, fp32, synthetic data`."""
    record = family[0].record
    return f"{record.plan.model}, {record.precision}, {record.data} data"


def works(cases: Sequence[Case]) -> tuple[Work, ...]:
    """The different works that the cases do, in the order of their appearance."""
    return tuple(dict.fromkeys(work_key(case.record) for case in cases))


def work_sign(number: int) -> str:
    """`A` … `Z`, then `A2` …: how tables mark rows that did the same work."""
    return chr(ord("A") + number % 26) + (str(number // 26 + 1) if number >= 26 else "")


def work_text(work: Work) -> str:
    """`VGG16, 224 samples a step, synthetic data, fp32`."""
    return f"{work.model}, {work.rows:,} samples a step, {work.data} data, {work.precision}"


def differences(case: Case, other: Case) -> tuple[str, ...]:
    """What makes the work of two cases differ, in words; nothing for the same work on the same cluster.

    `('batch 224 against 256', 'cluster a against b')`
    """
    one, two = case.record, other.record
    pairs = (
        ("model", one.plan.model, two.plan.model),
        ("batch", f"{one.step_samples:,}", f"{two.step_samples:,}"),
        ("data", one.data, two.data),
        ("precision", one.precision, two.precision),
        ("cluster", one.cluster, two.cluster),
    )
    each = f", both {rows_of(case.rows_per_device)} a device" if case.rows_per_device == other.rows_per_device else ""
    told = (f"{word} {mine} against {yours}{each * (word == 'batch')}" for word, mine, yours in pairs if mine != yours)
    return tuple(told)


def find_base(case: Case, family: Sequence[Case]) -> Case | None:
    """What a case's speedup is told against: same source, fewest devices, then same cluster and plainest type."""
    others = [other for other in family if other.source == case.source]

    def rank(other: Case) -> tuple[int, int, bool, bool]:
        plain = strategy(other.plan) in ("one device", "data parallel")
        alike = len(differences(case, other))
        return other.num_devices, alike, not plain, other is not case

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
        return self.predicted.samples_per_s / self.found.samples_per_s - 1

    @property
    def memory_error(self) -> float | None:
        """The same of the largest peak of a device."""
        predicted, found = peak_bytes(self.predicted), peak_bytes(self.found)
        return predicted / found - 1 if predicted and found else None

    @property
    def same_cluster(self) -> bool:
        """Whether the prediction was made for the cluster that it is held against."""
        return self.predicted.record.cluster == self.found.record.cluster

    @property
    def same_plan(self) -> bool:
        """Whether both ran one plan; a pair of one name may have run two."""
        return plan_key(self.predicted.plan) == plan_key(self.found.plan)


def peak_bytes(case: Case) -> int:
    """The largest peak of a device; 0 where none was watched."""
    return max((use.peak_bytes for use in case.stage_uses if use is not None), default=0)


def find_prediction(case: Case, cases: Sequence[Case]) -> Case | None:
    """The simulation of a case's plan and work; failing that, the one of its name and work."""
    if case.source == "simulated":
        return None
    work = work_key(case.record)
    simulated = [other for other in cases if other.source == "simulated" and work_key(other.record) == work]
    alike = [other for other in simulated if plan_key(other.plan) == plan_key(case.plan)]
    named = [other for other in simulated if other.name == case.name]
    # The same plan on another cluster is a worse match than the same one on the same cluster.
    ranked = sorted(alike or named, key=lambda other: (other.record.cluster != case.record.cluster, other not in named))
    return ranked[0] if ranked else None


def find_pairs(cases: Sequence[Case]) -> tuple[Pair, ...]:
    """Every rehearsed or measured case with its prediction, where there is one."""
    found = ((case, find_prediction(case, cases)) for case in cases)
    return tuple(Pair(predicted=predicted, found=case) for case, predicted in found if predicted is not None)
