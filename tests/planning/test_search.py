"""What the planner decides, on real hardware's files; and that it decides the same every time."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.planner import deep_profile

from stagewright.cluster import Cluster, Device, find_cluster, make_cluster
from stagewright.cost import Costs
from stagewright.errors import PlanError, StagewrightError, UsageError
from stagewright.plan import Plan, Policy
from stagewright.planning import PlanOptions
from stagewright.planning.explore import _thin_cuts
from stagewright.planning.search import Score, _bytes_text, make_plan, shape
from stagewright.profile import Profile
from stagewright.record import Record
from tests.planning.cases import GIB, MIB, chain, random_cluster, random_options, random_profile


@pytest.fixture(scope="module")
def vgg16() -> Profile:
    """VGG16 as a TITAN V should run it."""
    from stagewright.models import build_model
    from stagewright.profiling.analytic import make_analytic_profile
    from stagewright.profiling.kinds import find_kind

    model = build_model("vgg16", device="meta")
    return make_analytic_profile(model, find_kind("titan-v"), batch_sizes=(4, 16, 32, 128), name="vgg16")


def simulator(profile: Profile, cluster: Cluster) -> Score:
    from stagewright.scheduling import make_schedule
    from stagewright.simulation import simulate

    def score(plan: Plan) -> Record:
        return simulate(make_schedule(plan), profile, cluster, detail=False)

    return score


def test_on_the_titan_v_host_vgg16_gets_uneven_stages_and_a_reason(vgg16: Profile) -> None:
    cluster = find_cluster("titan-v-8")
    found = make_plan(vgg16, cluster, PlanOptions(batch=224), simulator(vgg16, cluster))
    assert found.best.plan.replicas == (7, 1)
    assert found.data_parallel is not None
    assert found.best.step_s < found.data_parallel.step_s / 2
    assert found.data_parallel.limit.startswith("all-reduce of fc1 (392 MiB")
    assert "MiB of weights from" in found.reason
    assert "on 0:7 alone" in found.reason
    assert found.best.plan.notes == (found.reason,)
    assert len(found.others) == 3
    plan = found.best.plan  # what a run compares itself with
    assert (plan.predicted_step_s, plan.predicted_on) == (found.best.step_s, "titan-v-8")
    assert 0 < plan.predicted_compute_s[1] < plan.predicted_compute_s[0] < found.best.step_s
    assert min(plan.predicted_send_s) > 0


def test_stale_weights_are_used_only_where_they_are_allowed(vgg16: Profile) -> None:
    cluster = find_cluster("titan-v-8")
    exact = make_plan(vgg16, cluster, PlanOptions(batch=224))
    stale = make_plan(vgg16, cluster, PlanOptions(batch=224, staleness="any"))
    assert exact.best.plan.is_synchronous
    assert not stale.best.plan.is_synchronous
    assert stale.best.step_s < exact.best.step_s
    assert stale.data_parallel is not None
    assert stale.data_parallel.plan.is_synchronous


def test_parts_can_be_fixed_and_the_rest_is_searched(vgg16: Profile) -> None:
    cluster = find_cluster("titan-v-8")

    def planned(**given: object) -> Plan:
        return make_plan(vgg16, cluster, PlanOptions(batch=224, **given)).best.plan  # type: ignore[arg-type]

    assert planned(placement="0:0-5.0:6-7").placement == "0:0-5.0:6-7"
    assert planned(cut=("conv3_1", "fc2")).stages[2].layers[0] == "fc2"
    assert planned(placement="0:0-6.0:7", cut=("fc1",)).stages[1].layers[0] == "fc1"
    assert len(planned(ratio="11:7").stages) == 2
    assert planned(num_microbatches=8, route="rotate").num_microbatches == 8
    assert planned(placement="").replicas == (8,)


def test_a_fast_network_makes_data_parallelism_the_best() -> None:
    cluster = make_cluster(4, device=Device(kind="cpu", memory_bytes=GIB), bytes_per_s=1e12)
    found = make_plan(chain((1.0,) * 6, weights=(MIB,) * 6), cluster, PlanOptions(batch=8))
    assert shape(found.best.plan) == "data parallel"
    assert "no cut gains" in found.reason


def test_a_slow_device_gets_less_or_nothing() -> None:
    kinds = (Device(kind="cpu", memory_bytes=GIB),) * 2 + (Device(kind="slow", memory_bytes=GIB, speed=0.001),)
    cluster = make_cluster(3)
    mixed = replace(cluster, hosts=(replace(cluster.hosts[0], devices=kinds),))
    found = make_plan(chain((1.0,) * 4), mixed, PlanOptions(batch=8))
    work = sum(len(stage.layers) for stage in found.best.plan.stages if "0:2" in map(str, stage.devices))
    assert work in (0, 4)  # left out, or one of three replicas that gets no row of eight
    assert found.best.step_s < 2.1


def test_many_devices_that_differ_are_exchanged_between_stages() -> None:
    """Without that the search ends at 1.003 s: too many devices to look at every group of them."""
    draw = random.Random(7)
    profile, cluster = random_profile(draw, draw.choice((10, 18, 26))), random_cluster(draw, draw.choice((7, 8)))
    assert make_plan(profile, cluster, PlanOptions(batch=24)).best.step_s <= 0.7432 * 1.01


@pytest.mark.parametrize("memory", [1, 1000])
def test_a_one_byte_device_is_refused_with_the_reason(memory: int, vgg16: Profile) -> None:
    cluster = make_cluster(8, name="tiny", device=Device(kind="titan-v", memory_bytes=memory))
    with pytest.raises(PlanError) as refused:
        make_plan(vgg16, cluster, PlanOptions(batch=224))
    assert "no plan of vgg16 for 224 rows fits on tiny" in refused.value.what
    assert _bytes_text(memory) in refused.value.what
    assert "needs" in refused.value.what or "need" in refused.value.what
    assert refused.value.todo is not None
    assert "larger devices" in refused.value.todo


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_never_exceeds_the_memory_that_it_was_given(seed: int) -> None:
    """By the simulator's own count, on devices that hardly suffice."""
    draw = random.Random(seed)
    profile, cluster = random_profile(draw, 6), random_cluster(draw, 3)
    score = simulator(profile, cluster)
    try:
        found = make_plan(profile, cluster, random_options(draw, wide=False), score)
    except PlanError:
        return
    for choice in (found.best, *found.others):
        for use in score(choice.plan).devices:
            host, device = map(int, use.device.split(":"))
            assert use.peak_bytes <= cluster.hosts[host].devices[device].memory_bytes


@pytest.mark.parametrize(("policy", "held"), [("gpipe", 8), ("1f1b", 2)])
def test_the_estimate_alone_counts_every_microbatch_that_the_schedule_holds(policy: Policy, held: int) -> None:
    """gpipe with K = 2 runs all forwards of two batches of four microbatches before the first backward."""
    profile = chain((1.0, 1.0), saved=100e6, weights=(MIB, MIB))
    options = PlanOptions(
        batch=8, placement="0:0.0:1", num_microbatches=4, policy=policy, staleness="2,1", recompute=False
    )
    for room, fits in ((held, True), (held - 1, False)):
        cluster = make_cluster(2, device=Device(kind="cpu", memory_bytes=int(room * 2 * 100e6) + 8 * MIB))
        if not fits:
            with pytest.raises(PlanError, match="fits on"):
                make_plan(profile, cluster, options)
            continue
        plan = make_plan(profile, cluster, options).best.plan
        peaks = [use.peak_parts["activations"] for use in simulator(profile, cluster)(plan).devices]
        assert peaks[0] == held * 2 * 100e6


def by_taste(plan: Plan, step_s: float) -> Record:
    return Record(
        name="s", source="simulated", plan=plan, cluster="c", step_s=(step_s,), step_samples=plan.batch, limit="taste"
    )


def test_the_score_has_the_last_word() -> None:
    """A score that hates two stages turns the choice."""
    profile = chain((1.0,) * 4, weights=(400 * MIB,) * 4)
    cluster = make_cluster(2, device=Device(kind="cpu", memory_bytes=64 * GIB), bytes_per_s=1e8)
    plain = make_plan(profile, cluster, PlanOptions(batch=8))
    assert len(plain.best.plan.stages) == 2

    def score(plan: Plan) -> Record:
        return by_taste(plan, 1.0 if len(plan.stages) == 1 else 9.0)

    scored = make_plan(profile, cluster, PlanOptions(batch=8), score)
    assert len(scored.best.plan.stages) == 1
    assert scored.best.limit == "taste"


def test_what_leads_with_a_flush_is_tried_without_one() -> None:
    """The estimate holds a dozen others for faster without a flush, and the score does not."""
    times, weights = (1.0, 3.0, 1.0, 2.0, 1.0, 2.0, 2.0, 2.0), (400, 10, 1, 1, 10, 1, 10, 10)
    profile = chain(times, weights=tuple(each * MIB for each in weights))
    cluster = make_cluster(4, device=Device(kind="cpu", memory_bytes=64 * GIB), bytes_per_s=1e8)

    def form(plan: Plan) -> list[tuple[str, int]]:
        return [(stage.layers[0], len(stage.devices)) for stage in plan.stages]

    exact = make_plan(profile, cluster, PlanOptions(batch=8)).best.plan
    assert form(exact) == [("a", 1), ("c", 3)]

    def score(plan: Plan) -> Record:
        return by_taste(plan, 100.0 if form(plan) == form(exact) else 200.0)

    for staleness, versions in (("ssp", (2, 1)), ("any", (1, 1)), ("3,1", (3, 1))):
        found = make_plan(profile, cluster, PlanOptions(batch=8, staleness=staleness), score).best
        assert (form(found.plan), found.plan.versions, found.step_s) == (form(exact), versions, 100.0)
    tiny = make_cluster(4, device=Device(kind="cpu", memory_bytes=MIB), bytes_per_s=1e8)
    with pytest.raises(PlanError, match="fits on"):
        make_plan(profile, tiny, PlanOptions(batch=8, staleness="ssp"), score)


def test_a_plan_of_another_number_of_stages_wins_by_its_order() -> None:
    """Three stages are fastest as the search finds them, two are in another order, which is tried for these as well."""
    profile = chain((1.0,) * 4, weights=(400 * MIB,) * 4)
    cluster = make_cluster(4, device=Device(kind="cpu", memory_bytes=64 * GIB), bytes_per_s=1e8)

    def score(plan: Plan) -> Record:
        step_s = {2: 0.8 if plan.policy == "zero-bubble" else 1.1, 3: 1.0}
        return by_taste(plan, step_s.get(len(plan.stages), 3.0))

    found = make_plan(profile, cluster, PlanOptions(batch=8, num_microbatches=4), score)
    assert (len(found.best.plan.stages), found.best.plan.policy) == (2, "zero-bubble")
    assert len(found.others[0].plan.stages) == 3


PROGRAM = """
import sys
from stagewright.cluster import Cluster
from stagewright.planning import PlanOptions
from stagewright.planning.search import make_plan
from stagewright.profile import Profile
found = make_plan(Profile.load(sys.argv[1]), Cluster.load(sys.argv[2]), PlanOptions(batch=24))
print(found.best.plan.to_dict(), [choice.plan.to_dict() for choice in found.others])
"""


def planned_with_seed(hash_seed: int, folder: Path) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-c", PROGRAM, str(folder / "profile.json"), str(folder / "cluster.json")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("runs", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_the_same_plan_whatever_the_hash_seed(runs: int, tmp_path: Path) -> None:
    draw = random.Random(5)
    random_profile(draw, 14).save(tmp_path / "profile.json")
    random_cluster(draw, 7).save(tmp_path / "cluster.json")
    assert len({planned_with_seed(seed, tmp_path) for seed in range(runs)}) == 1


@pytest.mark.slow
def test_a_thousand_layers_on_64_devices_are_planned() -> None:
    """How fast: benchmarks/planner.py."""
    cluster = make_cluster(64, device=Device(kind="cpu", memory_bytes=80 * GIB))
    found = make_plan(deep_profile(1000), cluster, PlanOptions(batch=512))
    assert found.data_parallel is not None
    assert found.best.step_s <= found.data_parallel.step_s


def test_thinned_cuts_carry_little_and_keep_the_ends() -> None:
    profile = deep_profile(200)
    costs = Costs(profile, make_cluster(2))
    kept = _thin_cuts(costs, range(201), 40)
    assert (kept[0], kept[-1]) == (0, 200)
    assert len(kept) <= 40
    light = sum(costs.crossings[cut] == 1e5 for cut in kept[1:-1])
    assert light > 0.8 * (len(kept) - 2)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"batch_per_device": 8}, "--batch-per-device needs"),
        ({"batch": 8, "num_microbatches": 9}, "9, but the batch has 8 rows"),
        ({"batch": 8, "placement": "0:0.0:1", "cut": ("b", "c")}, "makes 3 stages, but the placement has 2"),
        ({"batch": 8, "placement": "0:0.0:1.0:2.0:3.0:4"}, "cannot be cut into the placement's 5"),
        ({"batch": 8, "staleness": "3,2,x"}, "--staleness is '3,2,x'"),
        ({"batch": 8, "placement": "0:9"}, "names device 9 of host 0"),
    ],
)
def test_contradictions_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(StagewrightError, match=words):
        make_plan(chain((1.0,) * 3), make_cluster(6), PlanOptions(**wrong))  # type: ignore[arg-type]


def test_a_batch_of_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="--batch is 0"):
        PlanOptions(batch=0)
