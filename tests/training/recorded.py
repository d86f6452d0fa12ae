"""A run that writes down which images it saw: `python -m tests.training.recorded FOLDER DATA FIRST STEPS`.

Each worker adds a line for every piece of a batch it was given: seen-WORKER.jsonl holds [batch, images] and
[batch, labels], read from the pixels and the labels themselves.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import stagewright as sw
from stagewright.cluster import parse_placement
from stagewright.data.opening import open_dataset
from stagewright.models import build_model
from stagewright.plan import Plan, Stage
from stagewright.training.config import Job
from stagewright.training.feeds import DataFeed
from tests.training.images import SIZE, numbers_of

BATCH, PLACEMENT = 12, "0:0-1.0:2"


class RecordingFeed(DataFeed):
    """Writes down what it gives; where HOLD names a batch, it waits there to be killed."""

    may_be_read_ahead = False

    def inputs(self, batch, start, stop):
        given = [*map(self.finish, super().inputs(batch, start, stop))]
        self.note("images", batch, numbers_of(given[0]))
        if batch >= int(os.environ.get("HOLD", sys.maxsize)):
            time.sleep(600)
        return given

    def targets(self, batch, start, stop):
        given = super().targets(batch, start, stop)
        self.note("labels", batch, given[0].tolist())
        return given

    def note(self, kind: str, batch: int, rows: list[int]) -> None:
        path = Path(os.environ["SEEN"]) / f"{kind}-{os.environ['RANK']}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps([batch, rows]) + "\n")


def make_plan(layers: tuple[str, ...]) -> Plan:
    """Two replicas of the convolutions, one of the rest."""
    groups, cut = parse_placement(PLACEMENT), layers.index("fc1")
    stages = (Stage(layers=layers[:cut], devices=groups[0]), Stage(layers=layers[cut:], devices=groups[1]))
    return Plan(model="tiny-cnn", stages=stages, batch=BATCH, num_microbatches=2)


def main(folder: str, data: str, first: str, steps: str) -> None:
    dataset = open_dataset(data)
    model = build_model("tiny-cnn", num_classes=dataset.num_classes, image_size=SIZE)
    job = Job(steps=int(steps), first_step=int(first), log_every=1, warm_up=0, steps_per_epoch=len(dataset) // BATCH)
    feed = RecordingFeed(dataset, size=SIZE, seed=5)
    command = [sys.executable, "-m", "tests.training.recorded", folder, data, first, steps]
    schedule = sw.make_schedule(make_plan(model.names))
    sw.train(schedule, model, data=feed, job=job, folder=folder, command=command)


if __name__ == "__main__":
    main(*sys.argv[1:])
