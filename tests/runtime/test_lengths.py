"""Rows may be longer or shorter in every batch: real workers, exact in double precision, tokens unevenly counted."""

from __future__ import annotations

import json

import pytest
import torch

import stagewright as sw
from stagewright.models.loss import token_cross_entropy_sum
from stagewright.runtime.feed import CheckedFeed, FunctionFeed, ReadAhead
from stagewright.runtime.replica import make_replicas
from stagewright.runtime.settings import Settings
from stagewright.runtime.world import open_world
from tests.runtime.lengths import LENGTHS, PLANS, Attending, Changing
from tests.runtime.running import run_workers


@pytest.fixture(scope="module")
def gaps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """How far each plan's losses, weights and evaluation are from a plain loop's."""
    results = tmp_path_factory.mktemp("lengths") / "results.jsonl"
    run_workers(3, "tests.runtime.lengths", str(results), timeout_s=200)
    return dict(json.loads(line) for line in results.read_text().splitlines())


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", PLANS)
def test_lengths_that_change_with_every_batch_change_nothing_else(name: str, gaps: dict[str, float]) -> None:
    assert gaps[name] < 1e-12


def test_wrapped_feeds_say_how_long_rows_are() -> None:
    device = torch.device("cpu")
    wrapped = CheckedFeed(ReadAhead(Changing(), device), device, all_labels_count=False)
    assert wrapped.lengths == LENGTHS
    assert [wrapped.length(batch) for batch in range(4)] == [6, 9, 12, 6]
    plain = FunctionFeed(lambda batch, start, stop: ((), ()))
    assert CheckedFeed(plain, device, all_labels_count=False).length(0) is None


def test_one_layer_cannot_be_found_at_another_length_and_compiled_code_has_one() -> None:
    sample = torch.zeros(2, LENGTHS[-1], dtype=torch.int64)
    loss = sw.mean_loss(lambda scores, labels: scores.mean())
    made = sw.make_layered(Attending(), (sample,), loss=loss, targets=(sample,))
    assert made.at_length(6).inputs[0].shape_per_row == made.at_length(6).targets[0].shape_per_row == (6,)
    assert made.at_length(LENGTHS[-1]) is made
    with pytest.raises(sw.ModelError, match=r"does not run on 2 rows|cannot be traced"):
        made.at_length(LENGTHS[-1] + 1)
    plan = sw.Plan(model="own", stages=(sw.Stage(layers=made.names, devices=sw.parse_devices("0:0")),), batch=4)
    settings = Settings(compile=True)
    with open_world(settings) as world, pytest.raises(sw.UsageError, match="--compile makes code for one length"):
        make_replicas(plan, made, world, settings, lambda parameters: torch.optim.SGD(parameters, 0.1), LENGTHS)


def test_rows_are_read_ahead_and_each_is_given_once() -> None:
    asked: list[tuple[int, int, int]] = []

    def rows(batch: int, start: int, stop: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        asked.append((batch, start, stop))
        if batch > 2:
            raise IndexError("there is no such batch")
        return [torch.full((stop - start,), batch)], []

    feed = ReadAhead(FunctionFeed(rows), torch.device("cpu"), batches=2)
    for batch in range(3):
        assert feed.inputs(batch, 1, 3)[0].tolist() == [batch, batch]
    with pytest.raises(IndexError, match="no such batch"):
        feed.inputs(3, 1, 3)
    feed._pool.shutdown(wait=True)
    assert sorted(asked) == [(batch, 1, 3) for batch in range(6)], "each batch once, two ahead of the last one"


def test_a_stage_at_another_length_has_the_same_weights() -> None:
    sample = torch.zeros(2, LENGTHS[-1], dtype=torch.int64)
    made = sw.make_layered(Attending(), (sample,), loss=token_cross_entropy_sum(), targets=(sample,))
    plan = sw.Plan(
        model="own", stages=(sw.Stage(layers=made.names, devices=sw.parse_devices("0:0"), versions=2),), batch=4
    )
    settings = Settings(precision="fp64")
    with open_world(settings) as world:
        here = make_replicas(plan, made, world, settings, lambda each: torch.optim.SGD(each, 0.1), LENGTHS)[0]
    for batch in range(2):
        modules = [here.module(batch, length) for length in (None, *LENGTHS)]
        first = dict(modules[0].named_parameters())
        assert all(dict(each.named_parameters()) == first for each in modules[1:])
        assert len({id(dict(each.named_buffers())["scale"]) for each in modules}) == 1
    assert here.module(0, 6) is not here.module(1, 6)
