"""The results in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.cluster import count
from stagewright.report.cases import SOURCES, Case, Results, differences, families, find_prediction, strategy
from stagewright.report.figures import amount, percent, times

_VERBS = {
    "measured": "trains", "rehearsed": "trains, rehearsed on emulated hosts,",
    "simulated": "would train, by simulation,",
}  # fmt: skip


def sentences(results: Results) -> tuple[str, ...]:
    """One sentence for each model, data and precision; the strongest evidence and the largest gain first."""
    if not results.cases:
        return (f"{count(len(results.failures), 'case')} failed, and none gave a result.",)
    told = [(hero, _find_rival(hero, family)) for family in families(results.cases) for hero in [find_hero(family)]]
    told.sort(key=lambda pair: (SOURCES.index(pair[0].source), -(pair[0].gain(pair[1]) if pair[1] else 0.0)))
    models = [hero.plan.model for hero, _ in told]
    return tuple(
        _sentence(hero, rival, results.cases, tell_data=models.count(hero.plan.model) > 1) for hero, rival in told
    )


def find_hero(family: Sequence[Case]) -> Case:
    """The case a sentence is about: of the strongest evidence, the fastest with stages, or the fastest."""
    best = min(SOURCES.index(case.source) for case in family)
    strong = [case for case in family if SOURCES.index(case.source) == best]
    staged = [case for case in strong if len(case.plan.stages) > 1]
    return max(staged or strong, key=lambda case: case.samples_per_s)


def _find_rival(hero: Case, family: Sequence[Case]) -> Case | None:
    """Data parallelism over as many devices, or one device; with the least that differs."""
    others = [case for case in family if case.source == hero.source and case is not hero]
    peers = [case for case in others if strategy(case.plan) == "data parallel" and case.num_devices == hero.num_devices]
    single = [case for case in others if strategy(case.plan) == "one device"]
    pool = peers if len(hero.plan.stages) > 1 and peers else single
    return min(pool, key=lambda case: (len(differences(hero, case)), -case.samples_per_s), default=None)


def _sentence(hero: Case, rival: Case | None, cases: Sequence[Case], *, tell_data: bool) -> str:
    """`VGG16 over 7 + 1 devices trains 2.1 × as fast as data parallelism (1,488 against 702 samples/s …`"""
    device = "device" if hero.num_devices == 1 else "devices"
    which = f" ({hero.record.precision}, {hero.record.data} data)" if tell_data else ""
    replicas = " + ".join(map(str, hero.plan.replicas))
    start = f"{hero.plan.model}{which} over {replicas} {device} {_VERBS[hero.source]}"
    median = f"median of {len(hero.records)}" if len(hero.records) > 1 else ""
    if rival is None:
        told = f"at {hero.speed()}{f' ({median})' if median else ''}"
    else:
        unlike = differences(hero, rival)
        as_fast = f"as fast as {'one device' if strategy(rival.plan) == 'one device' else 'data parallelism'}"
        # Runs whose spreads overlap are not told apart.
        gain = f"{as_fast} to within the spread" if _overlap(hero, rival) else f"{times(hero.gain(rival))} {as_fast}"
        told = f"{gain} ({hero.speed().split()[0]} against {hero.speed(rival.samples_per_s)}"
        told += f", {median}" if median else ""
        told += f"; not the same work: {', '.join(unlike)})" if unlike else ")"
    return f"{start} {told}{_prophecy(hero, rival, cases)}."


def _overlap(hero: Case, rival: Case) -> bool:
    return min(hero.rates) <= max(rival.rates) and min(rival.rates) <= max(hero.rates)


def _prophecy(hero: Case, rival: Case | None, cases: Sequence[Case]) -> str:
    """`, as predicted (2.1 ×: 1,501 against 715)`, or what was predicted instead; nothing where nothing was.

    What is compared is what the sentence claims: which of two cases is faster and by how much, or one rate alone.
    """
    predicted, other = _foretold(hero, cases), None if rival is None else _foretold(rival, cases)
    if predicted is None:
        return ""
    if rival is None or other is None:
        error, told = predicted.gain(hero) - 1, amount(predicted.samples_per_s, predicted.record)
        as_told, else_told = (
            (", as", "; predicted were") if rival is None else (", the former as", "; the former was to be")
        )
        return f"{as_told} predicted ({told})" if _is_near(error) else f"{else_told} {told} ({percent(error)})"
    found, ratio, overlap = hero.gain(rival), predicted.gain(other), _overlap(hero, rival)
    rates = (amount(each.samples_per_s, each.record) for each in (predicted, other))
    told = f"{times(ratio)}: {' against '.join(rates)}"
    if not overlap and (ratio - 1) * (found - 1) < 0:
        return f"; the opposite was predicted ({told})"
    error = ratio - 1 if overlap else ratio / found - 1
    return f", as predicted ({told})" if _is_near(error) else f"; predicted were {told}"


def _is_near(error: float) -> bool:
    """Whether a prediction may be called one that came true."""
    return abs(error) <= 0.05


def _foretold(case: Case, cases: Sequence[Case]) -> Case | None:
    """The prediction of a case for the cluster that it ran on."""
    found = find_prediction(case, cases)
    return found if found is not None and found.record.cluster == case.record.cluster else None
