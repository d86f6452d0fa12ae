"""Profiles of cores that others use too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.profile import LayerProfile, Profile
from stagewright.profiling.noise import line_through, on_lines

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
def test_layers_on_lines_add_up_to_the_model_on_a_line(forward: tuple[float, ...], backward: tuple[float, ...]) -> None:
    layer = LayerProfile(
        name="conv", forward_s=forward, backward_s=backward, output_bytes=8, saved_bytes=8, parameter_bytes=0
    )
    whole = tuple(map(sum, zip(forward, backward)))
    profile = Profile(model="any", device="cpu", source="measured", batch_sizes=SIZES, layers=(layer,), model_s=whole)
    made = on_lines(profile)
    assert made.model_s == pytest.approx([sum(each) for each in zip(*made.layers[0].timed.values())])
    starts = [line[0] - 4 * (line[1] - line[0]) / 4 for line in made.layers[0].timed.values()]
    if min(starts) > 1e-6:
        assert made.model_s == pytest.approx(line_through(SIZES, whole, whole))


def test_two_batch_sizes_are_a_line_already() -> None:
    layer = LayerProfile(
        name="fc", forward_s=(3.0, 1.0), backward_s=(1.0, 1.0), output_bytes=8, saved_bytes=8, parameter_bytes=0
    )
    profile = Profile(
        model="any", device="cpu", source="measured", batch_sizes=(4, 8), layers=(layer,), model_s=(4.0, 2.0)
    )
    assert on_lines(profile) == profile
