"""A run that writes down which rows of tokens it saw: `python -m tests.training.recorded_text FOLDER TOKENS PLACEMENT`.

Each worker adds a line for every piece of a batch it was given: inputs-WORKER.jsonl holds [batch, rows], and so does
targets-WORKER.jsonl.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import stagewright as sw
from stagewright.data.packing import pack
from stagewright.data.tokens import open_tokens
from stagewright.models import build_model
from stagewright.training.feeds import TextFeed

BATCH, LENGTH, PER_EPOCH = 6, 8, 12


class RecordingFeed(TextFeed):
    """Writes down what it gives; where HOLD names a batch, it waits there to be killed."""

    def inputs(self, batch, start, stop):
        if batch >= int(os.environ.get("HOLD", sys.maxsize)):
            time.sleep(600)
        return self.note("inputs", batch, super().inputs(batch, start, stop))

    def targets(self, batch, start, stop):
        return self.note("targets", batch, super().targets(batch, start, stop))

    def note(self, which: str, batch: int, given):
        path = Path(os.environ["SEEN"]) / f"{which}-{os.environ.get('RANK', '0')}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps([batch, given[0].tolist()]) + "\n")
        return given

    may_be_read_ahead = False  # what is noted has been used


def plan_of(names: tuple[str, ...], placement: str) -> sw.Plan:
    """The model cut in the middle, or not."""
    groups = [sw.parse_devices(part) for part in placement.split(".")]
    edges = [0, *([len(names) // 2] if len(groups) > 1 else []), len(names)]
    stages = tuple(sw.Stage(layers=names[a:b], devices=group) for a, b, group in zip(edges, edges[1:], groups))
    return sw.Plan(model="gpt-tiny", stages=stages, batch=BATCH, num_microbatches=2)


def main(folder: str, tokens: str, placement: str) -> None:
    model = build_model("gpt-tiny", context=LENGTH, dropout=0.0, vocabulary=32)
    feed = RecordingFeed(pack(open_tokens(tokens), LENGTH, "documents"), model, seed=5)
    job = sw.Job(
        steps=PER_EPOCH, log_every=1, warm_up=0, steps_per_epoch=PER_EPOCH, checkpoint_every=1, keep=50, resume="auto"
    )
    sw.train(
        sw.make_schedule(plan_of(model.names, placement)), model, data=feed, job=job, folder=folder,
        recipe=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        settings=sw.Settings(precision="fp64", threads=1, timeout_s=90),
        command=[sys.executable, "-m", "tests.training.recorded_text", folder, tokens, placement],
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
