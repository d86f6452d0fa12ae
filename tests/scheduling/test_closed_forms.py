"""What theory says about equal stages and free links."""

from __future__ import annotations

from fractions import Fraction

import pytest

from stagewright.policy import holds
from stagewright.scheduling import make_schedule
from stagewright.scheduling.ideal import run_ideally
from tests.scheduling.cases import placed, plan_of
from tests.scheduling.interpreter import carry_out

SIZES = [(stages, microbatches) for stages in (1, 2, 3, 4, 8) for microbatches in (1, 2, 3, 4, 8, 16, 32)]


def bubble(num_stages: int, num_microbatches: int, policy: str) -> Fraction:
    """The idle share of one batch, as a fraction."""
    run = run_ideally(make_schedule(plan_of((1,) * num_stages, num_microbatches), policy=policy))
    return 1 - Fraction(3 * num_microbatches, round(run.length))


@pytest.mark.parametrize("policy", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_the_bubble_of_gpipe_and_1f1b(stages, microbatches, policy):
    """(S − 1) / (M + S − 1): Huang et al., "GPipe", 2019; Narayanan et al., "PipeDream", 2019."""
    assert bubble(stages, microbatches, policy) == Fraction(stages - 1, microbatches + stages - 1)


@pytest.mark.parametrize(("stages", "microbatches"), [size for size in SIZES if size[1] >= size[0] > 1])
def test_the_idle_time_of_zero_bubble_is_a_third_of_that_of_1f1b(stages, microbatches):
    """(S − 1)(F + I − W) against (S − 1)(F + I + W), all halves being equal: Qi et al., 2023, table 2."""
    lengths = {
        policy: run_ideally(make_schedule(plan_of((1,) * stages, microbatches), policy=policy)).length
        for policy in ("1f1b", "zero-bubble")
    }
    idle = {policy: length - 3 * microbatches for policy, length in lengths.items()}
    assert idle == {"1f1b": 3 * (stages - 1), "zero-bubble": stages - 1}
    assert bubble(stages, microbatches, "zero-bubble") < bubble(stages, microbatches, "1f1b")


@pytest.mark.parametrize(
    ("workers", "rounds", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 8), (4, 4, 16), (2, 4, 8)]
)
def test_interleaving_divides_the_bubble_by_the_stages_a_worker_has(workers, rounds, microbatches):
    """(P − 1)(F + B) / V beside M (F + B) of compute: Narayanan et al., 2021, section 2.2.2."""
    text = ".".join(f"0:{stage % workers}" for stage in range(workers * rounds))
    run = run_ideally(make_schedule(placed(text, microbatches), policy="interleaved"))
    assert run.length == 3 * rounds * microbatches + 3 * (workers - 1)


@pytest.mark.parametrize(("stages", "microbatches"), [size for size in SIZES if size[0] > 1])
def test_1f1b_holds_as_many_activations_as_there_are_stages_left(stages, microbatches):
    schedule = make_schedule(plan_of((1,) * stages, microbatches))
    held = [min(microbatches, stages - stage) for stage in range(stages)]
    assert list(holds(schedule.plan)) == held
    assert carry_out(schedule, 1, meet=True) == dict(enumerate(held))


@pytest.mark.parametrize(("stages", "microbatches"), [(3, 4), (4, 8), (8, 16)])
def test_gpipe_holds_everything_and_zero_bubble_no_more_than_1f1b_at_its_first_stage(stages, microbatches):
    plan = plan_of((1,) * stages, microbatches)
    assert set(carry_out(make_schedule(plan, policy="gpipe"), 1, True).values()) == {microbatches}
    assert set(carry_out(make_schedule(plan, policy="zero-bubble"), 1, True).values()) == {stages}


@pytest.mark.parametrize("replicas", [(7, 1), (3, 1), (2, 5), (1, 3, 1), (4, 2, 1)])
@pytest.mark.parametrize("microbatches", [1, 5, 14])
@pytest.mark.parametrize("policy", ["gpipe", "1f1b", "zero-bubble", "dynamic"])
@pytest.mark.parametrize("staleness", ["0", "ssp"])
def test_nobody_holds_more_than_promised(replicas, microbatches, policy, staleness):
    schedule = make_schedule(plan_of(replicas, microbatches, route="rotate"), policy=policy, staleness=staleness)
    held = carry_out(schedule, len(replicas) + 2, meet=False)
    assert all(count <= holds(schedule.plan)[stage] for stage, count in held.items())


@pytest.mark.parametrize("stages", [2, 4])
def test_the_stale_synchronous_loop_has_no_bubble_in_its_steady_state(stages):
    """A batch more costs a batch's compute and no more."""
    schedule = make_schedule(plan_of((1,) * stages, 4), staleness="ssp")
    lengths = [run_ideally(schedule, batches).length for batches in (20, 21)]
    assert lengths[1] - lengths[0] == 4 * 3


def test_balanced_stages_that_take_turns_keep_each_other_busy():
    plan = plan_of((3, 1), 30, route="rotate")
    assert run_ideally(make_schedule(plan), is_balanced=True).idle_share < 0.15
