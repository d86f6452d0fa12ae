"""Takes the place of `stagewright` in tests of the harness: a real process that leaves a record in a moment.

    python -m tests.bench.pretend train MODEL … -o DIR --json

It appends a line to $PRETEND_LOG when it begins and when it ends. The model says how it behaves: `resnet18` fails as
the real command would, `vgg16` is killed, `gpt2-small` never ends, `resnet101` ends well and leaves nothing.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from stagewright.cluster import DeviceId
from stagewright.plan import Plan, Stage
from stagewright.record import DeviceUse, Record


def note(text: str) -> None:
    """Writes a line that no other process can break up."""
    with Path(os.environ["PRETEND_LOG"]).open("a", encoding="utf-8") as file:
        file.write(text + "\n")


def main() -> None:
    """Pretends to train."""
    words = sys.argv[1:]
    model, folder = words[1], Path(words[words.index("-o") + 1])
    note(f"begin {folder.name}")
    time.sleep(float(os.environ.get("PRETEND_S", "0.05")))
    if model == "resnet18":
        print(f"warming up\nerror: the loss of step 1 is nan\n       lower the learning rate\n       see {folder}/logs")
        sys.exit(2)
    if model == "vgg16":
        os.kill(os.getpid(), signal.SIGKILL)
    if model == "gpt2-small":
        time.sleep(600)
    if model != "resnet101":
        make_record(model).save(folder / "record.json")
    note(f"end {folder.name}")


def make_record(model: str) -> Record:
    """A record of a run on one device."""
    device = DeviceId(0, 0)
    plan = Plan(model=model, stages=(Stage(layers=("a", "loss"), devices=(device,)),), batch=8)
    use = DeviceUse(device=str(device), stages=(0,), busy_share=0.5, peak_bytes=1 << 20)
    steps = tuple(random.uniform(0.009, 0.011) for _ in range(5))
    return Record(
        name=model, source="measured", plan=plan, cluster="local", step_s=steps, step_samples=8, devices=(use,)
    )


if __name__ == "__main__":
    main()
