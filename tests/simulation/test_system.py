"""Facts about a system: what overlaps what, and what a step takes by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import stagewright as sw
from stagewright.cluster import Cluster, Device, Host, Link
from stagewright.errors import StagewrightError
from stagewright.planning.fixed import fixed_plan
from stagewright.planning.search import make_plan as search
from stagewright.profile import LayerProfile, Profile
from stagewright.simulation import simulator
from stagewright.system import OWN, System

MB = 1_000_000
LAYERS = tuple(
    LayerProfile(
        name=name, forward_s=(1.0,), backward_s=(2.0,), output_bytes=0, saved_bytes=0, parameter_bytes=MB
    )
    for name in "abcd"
)  # fmt: skip
NET = Profile(model="net", device="x", source="imported", batch_sizes=(1,), layers=LAYERS, optimizer_s=0.4)
"""Four layers of 1 s forward, 2 s backward and a megabyte each; a step of the optimizer takes 0.4 s."""


def pair(bytes_per_s: float) -> Cluster:
    links = tuple(Link(ends=(end, "hub"), kind="x", bytes_per_s=bytes_per_s) for end in "01")
    return Cluster(name="pair", hosts=(Host(devices=(Device(kind="x", memory_bytes=1 << 30),) * 2, links=links),))


def step_s(system: System, *, rate: float = MB, batch: int = 2, **options: object) -> float:
    """A step of data parallelism over two devices, whose all-reduce of a layer takes `MB / rate` seconds."""
    plan = fixed_plan(NET, sw.PlanOptions(batch=batch, num_buckets=4, **options), pair(rate))  # type: ignore[arg-type]
    return simulator(NET, pair(rate), system)(plan).median_step_s


def test_what_is_shipped_as_our_own_is_what_the_simulator_assumes() -> None:
    assert System.find("stagewright") == OWN
    text = (Path(sw.__file__).parent / "systems" / "stagewright.yaml").read_text()
    assert {line.split(":")[0] for line in text.splitlines()} == {*OWN.to_dict()} - {"notes"}


def test_a_reduction_is_hidden_by_what_the_system_computes_meanwhile() -> None:
    # 12 s of computing, four pieces of 1 s each: one is left after backward, or all four.
    assert step_s(System(name="s", reduction_overlaps="backward")) == pytest.approx(12 + 1 + 0.4)
    assert step_s(System(name="s", reduction_overlaps="nothing")) == pytest.approx(12 + 4 + 0.4)
    assert step_s(OWN) == pytest.approx(12 + 1 + 0.4)


def test_with_versions_only_some_systems_hide_the_reduction_behind_the_next_batch() -> None:
    stale = {"staleness": "2", "rate": MB / 2}
    update_s = 0.4 * 1.4  # with the copy of the old version
    # Pieces of 2 s: what backward does not hide of them goes on during the next forward, or is waited for.
    assert step_s(OWN, **stale) == pytest.approx(12 + update_s)
    assert step_s(System(name="s", reduction_overlaps="backward"), **stale) == pytest.approx(12 + 2 + update_s)
    assert step_s(System(name="s", reduction_overlaps="nothing"), **stale) == pytest.approx(12 + 8 + update_s)
    free = System(name="s", copying_passes=0.0)
    assert step_s(free, **stale) == pytest.approx(12 + 0.4)


def test_pieces_and_the_optimizer_are_the_systems() -> None:
    whole = System(name="s", bucket_bytes=0)
    assert step_s(whole) == pytest.approx(12 + 4 + 0.4)
    assert step_s(replace(whole, bucket_bytes=2 * MB)) == pytest.approx(12 + 2 + 0.4)
    assert step_s(replace(OWN, optimizer_overlaps=True)) == pytest.approx(12 + 1 + 0.1)


def test_gradients_of_later_microbatches_are_added_as_the_system_does() -> None:
    passes = {"batch": 4, "num_microbatches": 2, "rate": 1e15}
    assert step_s(OWN, **passes) - step_s(System(name="s", adding_passes=0), **passes) == pytest.approx(0.4 * 3 / 5)


@pytest.mark.parametrize("system", ["backward", "nothing"])
@pytest.mark.parametrize("policy", ["1f1b", "gpipe", "zero-bubble", "dynamic"])
@pytest.mark.parametrize("placement", ["0:0-1", "0:0-1.0:0-1", "0:0.0:1.0:0-1"])
def test_a_worker_that_waits_for_reductions_never_waits_for_ever(system: str, policy: str, placement: str) -> None:
    for route, staleness in (("split", "0"), ("rotate", "0"), ("rotate", "ssp"), ("split", "2bw")):
        how = {"placement": placement, "policy": policy, "route": route, "staleness": staleness, "num_microbatches": 4}
        waits = step_s(System(name="s", reduction_overlaps=system), batch=8, **how)
        assert waits >= step_s(OWN, batch=8, **how) * (1 - 1e-9)


@pytest.mark.parametrize("facts", [{}, {"reduction_overlaps": "nothing"}, {"optimizer_overlaps": True}])
def test_the_planner_weighs_plans_as_the_system_works(facts: dict[str, object]) -> None:
    system, options = System(name="s", **facts), sw.PlanOptions(batch=2, num_buckets=4, num_microbatches=1)
    for score in (None, simulator(NET, pair(MB), system)):
        found = search(NET, pair(MB), options, score, system).data_parallel
        assert found is not None
        assert found.step_s == pytest.approx(step_s(system))


def test_a_system_is_a_file_and_wrong_ones_say_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("format: stagewright.system\nversion: 1\nname: mine\nreduction_overlaps: nothing\n")
    assert System.find(str(file)) == System(name="mine", reduction_overlaps="nothing")
    file.write_text("format: stagewright.system\nversion: 1\nname: mine\nreduction_overlaps: all\n")
    with pytest.raises(StagewrightError, match="reduction_overlaps is 'all': expected 'next-batch', 'backward'"):
        System.find(str(file))
    with pytest.raises(StagewrightError, match="ready-made: ddp, megatron, stagewright, unhidden-reduction"):
        System.find("ddq")
    for name in ("ddp", "megatron", "unhidden-reduction"):
        assert System.find(name).name == name


def test_a_record_says_as_what_it_was_simulated() -> None:
    plan = fixed_plan(NET, sw.PlanOptions(batch=2), pair(MB))
    notes = simulator(NET, pair(MB), System.find("megatron"))(plan).notes
    assert "as megatron works: sends block, reductions overlap nothing" in notes
