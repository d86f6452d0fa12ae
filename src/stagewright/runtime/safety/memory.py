"""What workers were predicted to hold, kept in the run's folder, and what is said when one runs out all the same."""

from __future__ import annotations

import gc
import json
import resource
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stagewright.errors import RunError
from stagewright.memory import StageBytes, in_words
from stagewright.runtime.run_folder import write_text
from stagewright.runtime.safety.diagnosis import Scene
from stagewright.schedule import Schedule

_FILE = "memory.json"
_WAYS = {
    "optimizer": "--optimizer sgd, which keeps less, or --lora", "gradients": "--lora, which trains little",
    "weights": "more stages, so that each has fewer layers",
    "rest": "--recompute, more --microbatches, or a smaller --batch",
}  # fmt: skip
"""What to change by what fills the memory; the rest is activations for the most part."""


def keep_prediction(folder: Path, needed: Sequence[StageBytes]) -> None:
    """Leaves what each worker is predicted to hold in the run's folder."""
    with suppress(OSError):  # whoever cannot write there hears of it
        write_text(folder / _FILE, json.dumps([each._asdict() for each in needed]))


def out_of_memory(fault: BaseException, schedule: Schedule, folder: Path, worker: int) -> RunError | None:
    """The error of a worker that ran out: what it was predicted to hold, what it held, by kind, and what to change.

    None where the fault is another; a MemoryError may be any code's own, and is told as it was raised.
    """
    if not isinstance(fault, torch.OutOfMemoryError) and "can't allocate memory" not in str(fault):
        return None
    plan, held, told = schedule.plan, _held_now(), list[str]()
    with suppress(OSError, ValueError, LookupError, TypeError):
        kinds = json.loads((folder / _FILE).read_text(encoding="utf-8"))[worker]
        told.append(f"predicted were {sum(kinds.values()) / 2**30:.2f} GiB: {in_words(kinds)}")
    asked = [each for each in str(fault).partition("\n")[0].split(". ") if "allocate" in each]
    what = f"{Scene(schedule, {}, {}, {}, {}, None).name_of(worker)} ran out of memory"
    what += f": {asked[-1].removesuffix('.')}" if asked else ""
    ways = [_WAYS[kind] for kind in sorted(held, key=lambda kind: -held[kind])[:2]]
    shared = zip(plan.workers, plan.shard_optimizer)
    if any(worker in members and len(members) > 1 and not shards for members, shards in shared):
        ways.append("--shard-optimizer, which shares states out among replicas")
    return RunError(what, "\n".join([*told, f"it held {in_words(held)}", f"use {'; '.join(ways)}"]))


def _held_now() -> dict[str, int]:
    """What this worker holds, as far as it can be told apart: the rest is activations, buffers and the framework."""
    everything = gc.get_objects()  # by type alone: some would do things when they are asked what they are
    parameters = [each for each in everything if issubclass(type(each), nn.Parameter)]
    optimizers = [each for each in everything if issubclass(type(each), Optimizer)]
    states = [value for each in optimizers for state in each.state.values() for value in state.values()]
    found = {
        "weights": _num_bytes(parameters),
        "gradients": _num_bytes(each.grad for each in parameters if each.grad is not None),
        "optimizer": _num_bytes(each for each in states if isinstance(each, Tensor)),
    }
    on_card = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
    whole = on_card or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**found, "rest": max(whole - sum(found.values()), 0)}


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of storages, each once; shapes alone have none."""
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors if not each.is_meta}
    return sum(each.nbytes() for each in storages.values())
