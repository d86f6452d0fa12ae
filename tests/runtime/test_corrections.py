"""Every correction of stale weights equals its reference, in fp64 with real processes."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from stagewright.cluster import Device, DeviceId
from stagewright.models import build_model
from stagewright.plan import Plan, Stage
from stagewright.runtime.corrections import CORRECTIONS, cost_of, price_of_staleness, warnings_of
from stagewright.runtime.safety.preflight import needed_bytes
from stagewright.runtime.settings import Settings
from stagewright.scheduling import make_schedule
from stagewright.training.config import Job
from stagewright.training.recipes import Recipe
from stagewright.training.start import train
from tests.runtime.cases import Case
from tests.runtime.test_exactness import check, run_cases

WAYS = [name for name in CORRECTIONS if name != "none"]


def the_cases() -> list[Case]:
    """Each correction on each placement with up to four versions, and what it must get on with."""
    delays = (("1-1", "4,1"), ("1-1", "2bw"), ("3-1", "ssp"), ("2-1-1", "4,2,1"), ("2-1-1", "ssp"))
    found = [
        Case(place, correct=way, staleness=stale, optimizer=optimizer, steps=10)
        for (place, stale), way, optimizer in product(delays, WAYS, ("sgd", "adamw"))
    ]
    for way in WAYS:
        how = {"correct": way, "steps": 10, "staleness": "3,2"}
        found += [
            Case("1-1", clip_norm=0.05, saved_after=5, **how), Case("1-1", precision="fp16", overflow_at=4, **how),
            Case("1-1", model="tied words", saved_after=4, optimizer="adamw", **how), Case("3-1", "dynamic", **how),
        ]  # fmt: skip
    by_stage = [Case("2-1-1", staleness="3,2,1", correct="predict,error-feedback,none", steps=10)]
    muon = [Case("1-1", staleness="2bw", optimizer="muon", correct=way, steps=8) for way in ("predict", "rescale")]
    return [*found, *by_stage, *muon]


@pytest.mark.timeout(300)
def test_corrections_equal_their_references(tmp_path: Path) -> None:
    """Clipped, with steps that overflow, resumed, with tied parameters, by arrival, and another one in each stage."""
    cases = the_cases()
    check(run_cases(cases, tmp_path, 140), len(cases))


# What is said of it


def test_costs_lie_between_those_that_were_measured() -> None:
    one, two = cost_of("muon", (2, 2), "none"), cost_of("muon", (4, 3, 2, 1), "none")
    between = cost_of("muon", (3, 2), "none"), cost_of("muon", (2, 2, 2, 3), "none")
    assert one is not None
    assert two is not None
    assert between[0] == pytest.approx(two), "1.5 steps on average, as with four stages"
    assert between[1] == pytest.approx((one + two) / 2)
    assert cost_of("muon", (1, 1), "none") == 0.0
    assert cost_of("muon", (90, 90), "none") == cost_of("muon", (30, 30), "none")
    assert cost_of("adafactor", (2, 1), "none") is None


def test_what_a_correction_keeps_is_needed_before_a_launch() -> None:
    layered = build_model("mlp")
    plan = Plan(model="mlp", stages=(Stage(layers=layered.names, devices=(DeviceId(0, 0),), versions=3),), batch=4)

    def needed(correct: str) -> int:
        settings, device = Settings(correct=(correct,)), Device(kind="cpu", memory_bytes=1 << 30)
        found = needed_bytes(plan, layered, settings, states=lambda role: 0, scratch=0.0, device=device)
        return sum(found[0])

    weights = 4 * sum(each.numel() for each in layered.model.parameters())
    assert [(needed(name) - needed("none")) // weights for name in ("rescale", "predict", "error-feedback")] == [
        0,
        2,
        3,
    ]


def test_a_plan_is_told_what_its_versions_cost() -> None:
    assert price_of_staleness((1, 1)) == ""
    assert "stale by 0.5 steps" in price_of_staleness((2, 1))
    assert "--correct" in price_of_staleness((2, 1))
    assert not [*warnings_of("adamw", (1, 1), ("none",)), *warnings_of("adamw", (2, 1), ("predict", "none"))]


def test_a_launch_without_a_correction_says_so_in_a_line(tmp_path: Path) -> None:
    layered = build_model("mlp")
    (tmp_path / "said.txt").touch()
    for number, correct in enumerate(("none", "predict")):
        with (tmp_path / "said.txt").open("a") as file:
            stage = Stage(layers=layered.names, devices=(DeviceId(0, 0),), versions=2)
            train(
                make_schedule(Plan(model="mlp", stages=(stage,), batch=4)), build_model("mlp"),
                recipe=Recipe(optimizer="adamw"), job=Job(steps=2), folder=tmp_path / str(number),
                settings=Settings(correct=(correct,)), console=Console(file=file, width=400),
            )  # fmt: skip
    assert (tmp_path / "said.txt").read_text().count("stale weights without a correction: adamw paid") == 1
