"""Every row of a batch reaches the first stage as an image and the last as a label, once, under every plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.cluster import parse_placement
from stagewright.data.opening import open_dataset
from stagewright.plan import Plan, Stage, parse_staleness
from stagewright.runtime.settings import Settings
from stagewright.training.feeds import DataFeed
from tests.training.images import SIZE, numbers_of, write_numbered

NUM_IMAGES, BATCH = 50, 12


def make_plan(placement: str, staleness: str = "0", microbatches: int = 1, route: str = "split") -> Plan:
    groups = parse_placement(placement)
    versions = parse_staleness(staleness, len(groups))
    stages = tuple(
        Stage(layers=(f"layer{number}",), devices=devices, versions=versions[number])
        for number, devices in enumerate(groups)
    )
    return Plan(model="any", stages=stages, batch=BATCH, num_microbatches=microbatches, route=route)  # type: ignore[arg-type]


PLANS = {
    "one": make_plan("0:0"),
    "dp": make_plan("0:0-3"),
    "3-1 1f1b": make_plan("0:0-2.0:3", microbatches=4),
    "3-1 rotate": make_plan("0:0-2.0:3", microbatches=4, route="rotate"),
    "3-1 ssp": make_plan("0:0-2.0:3", "ssp"),
    "shared": make_plan("0:0-1.0:0-1", microbatches=2),
    "5-2-1": make_plan("0:0-4.0:5-6.0:7", microbatches=3),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered(tmp_path_factory.mktemp("images") / "numbered", NUM_IMAGES)


class Workers:
    """The feeds of all workers of a plan, asked as the workers would ask them."""

    def __init__(self, directory: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, is_training: bool = True) -> None:
        self.plan, self.feeds = plan, []
        for worker in range(len(plan.devices)):
            monkeypatch.setenv("RANK", str(worker))
            feed = DataFeed(open_dataset(directory), size=SIZE, seed=3, is_training=is_training)
            feed.settle(plan, Settings())
            self.feeds.append(feed)

    def batch(self, number: int, rows: int = BATCH) -> tuple[list[int], list[int]]:
        """The images and the labels of a batch, in the order of its rows."""
        return [*self._rows(number, rows, 0)], [*self._rows(number, rows, len(self.plan.stages) - 1, labels=True)]

    def _rows(self, number: int, rows: int, stage: int, labels: bool = False) -> Iterator[int]:
        plan = replace(self.plan, batch=rows, num_microbatches=min(rows, self.plan.num_microbatches))
        for microbatch in range(plan.num_microbatches):
            for share in plan.shares(stage, microbatch):
                feed = self.feeds[plan.workers[stage][share.replica]]
                if labels:
                    yield from feed.targets(number, share.start, share.stop)[0].tolist()
                else:
                    yield from numbers_of(feed.finish(feed.inputs(number, share.start, share.stop)[0]))


@pytest.mark.parametrize("name", PLANS)
def test_an_epoch_is_the_same_images_under_every_plan(
    name: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, alone = (Workers(directory, PLANS[each], monkeypatch) for each in (name, "one"))
    epoch: list[int] = []
    for number in range(NUM_IMAGES // BATCH):
        images, labels = workers.batch(number)
        assert images == labels == alone.batch(number)[0]
        epoch += images
    assert len(set(epoch)) == len(epoch) == NUM_IMAGES // BATCH * BATCH
    assert workers.batch(NUM_IMAGES // BATCH)[0] != epoch[:BATCH]  # the next epoch has another order


@pytest.mark.parametrize("name", PLANS)
def test_an_evaluation_has_every_image_once_and_in_order(
    name: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers(directory, PLANS[name], monkeypatch, is_training=False)
    sizes = [BATCH] * (NUM_IMAGES // BATCH) + [NUM_IMAGES % BATCH]  # the last batch has 2 rows, fewer than replicas
    for _ in range(2):
        found = [workers.batch(number, rows) for number, rows in enumerate(sizes)]
        assert [image for images, _ in found for image in images] == list(range(NUM_IMAGES))
        assert [label for _, labels in found for label in labels] == list(range(NUM_IMAGES))


@pytest.mark.parametrize("first", [1, 3, 4, 6])
def test_a_batch_is_the_same_wherever_a_run_begins(
    first: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, resumed = (Workers(directory, PLANS["3-1 1f1b"], monkeypatch) for _ in range(2))
    expected = [whole.batch(number) for number in range(9)]
    assert [resumed.batch(number) for number in range(first, 9)] == expected[first:]


def test_batches_may_be_asked_for_out_of_order(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that runs whatever is ready may begin the second microbatch of batch 0 after batch 1."""
    feed = Workers(directory, make_plan("0:0", microbatches=2), monkeypatch).feeds[0]
    early = feed.inputs(0, 0, 6)[0], feed.inputs(1, 0, 6)[0], feed.inputs(0, 6, 12)[0], feed.inputs(1, 6, 12)[0]
    other = Workers(directory, make_plan("0:0"), monkeypatch)
    early = [*map(feed.finish, early)]
    assert numbers_of(early[0]) + numbers_of(early[2]) == other.batch(0)[0]
    assert numbers_of(early[1]) + numbers_of(early[3]) == other.batch(1)[0]
