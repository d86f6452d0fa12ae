"""Profiles of cores that others use too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.profile import LayerProfile, Profile
from stagewright.profiling.noise import added_up, line_through, on_lines

SIZES = (4, 8, 16)


def test_times_on_a_line_stay_and_others_come_to_it() -> None:
    assert line_through(SIZES, (5.0, 9.0, 17.0), (5.0, 9.0, 17.0)) == pytest.approx((5.0, 9.0, 17.0))
    first, middle, last = line_through(SIZES, (5.0, 12.0, 17.0), (1.0, 1.0, 1.0))
    assert last - middle == pytest.approx(2 * (middle - first))
    assert 9 < middle < 12


@pytest.mark.parametrize(("seconds", "expected"), [((1.0, 4.0, 16.0), "rows"), ((9.0, 6.0, 3.0), "none")])
def test_a_line_neither_begins_below_zero_nor_falls(seconds: tuple[float, ...], expected: str) -> None:
    first, middle, last = line_through(SIZES, seconds, (1.0, 1.0, 1.0))
    shape = {"rows": (first, 2 * first, 4 * first), "none": (first, first, first)}[expected]
    assert (first, middle, last) == pytest.approx(shape)
    assert min(seconds) <= middle <= max(seconds)


times = st.tuples(st.floats(1.0, 2.0), st.floats(2.1, 4.0), st.floats(4.1, 8.0))


@given(forward=times, backward=times)
def test_layers_come_to_lines_and_their_sum_stays_the_models(
    forward: tuple[float, ...], backward: tuple[float, ...]
) -> None:
    layer = LayerProfile(
        name="conv", forward_s=forward, backward_s=backward, output_bytes=8, saved_bytes=8, parameter_bytes=0
    )
    whole = tuple(map(sum, zip(forward, backward)))
    profile = Profile(model="any", device="cpu", source="measured", batch_sizes=SIZES, layers=(layer,), model_s=whole)
    made = on_lines(profile)
    lines = list(made.layers[0].timed.values())
    assert all(line[2] - line[1] == pytest.approx(2 * (line[1] - line[0])) for line in lines)
    if min(2 * line[0] - line[1] for line in lines) > 1e-6:
        sums = [sum(each) for each in zip(*lines)]
        assert sums == pytest.approx(line_through(SIZES, whole, whole)), "lines of the parts are the line of the whole"
    together = added_up(made)
    assert together.model_s == whole
    assert [sum(each) for each in zip(*together.layers[0].timed.values())] == pytest.approx(whole)


def test_two_batch_sizes_are_a_line_already() -> None:
    layer = LayerProfile(
        name="fc", forward_s=(3.0, 1.0), backward_s=(1.0, 1.0), output_bytes=8, saved_bytes=8, parameter_bytes=0
    )
    profile = Profile(
        model="any", device="cpu", source="measured", batch_sizes=(4, 8), layers=(layer,), model_s=(4.0, 2.0)
    )
    assert on_lines(profile) == profile
