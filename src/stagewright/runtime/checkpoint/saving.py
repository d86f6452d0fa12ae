"""Saving checkpoints of a running worker: copied between two steps, written by a thread.

    step     299      300         301         302
    worker   … U      U [copy]    F B U       F B U        the copy is all that training waits for
    thread                [ write, hash, fsync, rename ]

Each stage is copied right after its own update, so that stages which are at different batches at the same moment are
saved at the same one. What is in flight then need not be saved: a resumed run computes it again from the versions.
Tensors have the unsplit model's names, so that a run goes on under this plan or another:

    model/NAME               the newest weights, and buffers
    version-1/NAME …         the weights one update before, and so on, where a stage keeps several versions
    version-0/NAME           what the next batches use instead of the newest weights, where a correction says so
    moves/NAME               the last moves of a parameter, of a correction that goes by them
    optimizer/KIND/NAME      what the optimizer keeps for a parameter: momentum_buffer, exp_avg …
    share-START/KIND/NAME    the same for a replica's share of one, from the number START on as they lie in memory
    random/WORKER/…          the state of a worker's generators
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stagewright.errors import CheckpointError, RunError
from stagewright.models import Layered
from stagewright.runtime.checkpoint.contents import (
    add_numbers,
    optimizer_name,
    random_tensors,
    stage_buffers,
    stage_tensors,
)
from stagewright.runtime.checkpoint.storage import (
    Tensors,
    finish,
    path_of,
    prune,
    reason,
    together,
    unfinished,
    write_part,
)
from stagewright.runtime.worker import Worker

if TYPE_CHECKING:
    from stagewright.runtime.checkpoint.remote import Copier


_BY_NAME = ("numbers", "options", "layouts")
"""What a manifest says of parameters by their names; layouts are of those whose shares do not lie row by row."""


@dataclass(frozen=True)
class _Saved:
    """What became of one checkpoint."""

    step: int
    seconds: float
    stopped_s: float
    """How long training stood still for it."""
    fault: str | None = None
    slow: str | None = None
    """Whose disk it waited for, where that is one worker's."""

    def __str__(self) -> str:
        if self.fault is not None:
            return f"step {self.step} could not be saved: {self.fault}"
        text = f"step {self.step} saved in {self.seconds:.2f} s, training stood still for {self.stopped_s * 1e3:.1f} ms"
        return f"{text}; {self.slow}" if self.slow else text


@dataclass
class _Copies:
    """A checkpoint on its way from the stages to the thread."""

    waiting: set[int | str]
    places: Tensors
    """Memory of the host to copy to, from checkpoint to checkpoint the same."""
    tensors: Tensors = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=lambda: {"scheduler": {}, **{key: {} for key in _BY_NAME}})
    stopped_s: float = 0.0


class Checkpointer:
    """Copies a worker's state when it is due, and has a thread write it. All workers must make one."""

    def __init__(
        self, worker: Worker, layered: Layered, folder: Path, *, every: int | None, keep: int, run: str | None = None,
        patience: Callable[[], AbstractContextManager[None]] = nullcontext,
        may_prune: Callable[[], bool] = lambda: True, copier: Copier | None = None,
    ) -> None:  # fmt: skip
        self.worker, self.folder, self.every, self.keep, self.run = worker, folder, every, keep, run
        world = worker.world
        self._limit_s = worker.settings.save_timeout_s
        wait = max(world.timeout, timedelta(seconds=self._limit_s))
        self._group = dist.new_group(timeout=wait, backend="gloo") if world.size > 1 else None
        self._left_over, self._aliases = _outside_stages(layered) if world.worker == 0 else ({}, {})
        self._last_step: int | None = None
        """The last step that was handed to the thread."""
        self._patience, self._may_prune, self.copier = patience, may_prune, copier
        """What holds while this worker waits for the disk; whether what is saved now is worth more than what was."""
        self._good: set[str] = set()
        self._under_way: dict[int, _Copies] = {}
        self._free: list[Tensors] = []
        self._news: queue.SimpleQueue[_Saved] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        """What writes the last checkpoint."""

    def is_due(self, batch: int) -> bool:
        """Whether a checkpoint follows the update of a batch."""
        return self.every is not None and (batch + 1) % self.every == 0

    def note_stage(self, stage: int, batch: int) -> None:
        """Copies a stage that has just been updated, where a checkpoint is due."""
        if not self.is_due(batch):
            return
        here = self.worker.replicas[stage]
        with self._copying(stage, batch) as copies:
            here.reducer.settle()
            self._copy(stage_tensors(here, len(self.worker.plan.workers[stage])), copies)
            if here.replica == 0:
                self._copy(stage_buffers(here), copies)
            if here.replica == 0 or here.reducer.is_sharing:
                add_numbers(here, copies.about)

    def note_worker(self, batch: int) -> None:
        """Adds what a worker has beside its stages."""
        if not self.is_due(batch):
            return
        world = self.worker.world
        with self._copying("worker", batch) as copies:
            self._copy({**random_tensors(world.worker, world.device), **self._left_over}, copies)
            copies.about["loss_scale"] = list(self.worker.scale.saved(batch + 1))
            copies.about["optimizer"] = optimizer_name(self.worker.replicas.values())

    def save(self, step: int) -> None:
        """Copies everything as it is now, between two stretches, unless this very step was saved before."""
        if self._last_step == step:
            return
        every, self.every = self.every, step
        for stage in self.worker.replicas:
            self.note_stage(stage, step - 1)
        self.note_worker(step - 1)
        self.every = every

    @contextmanager
    def _copying(self, part: int | str, batch: int) -> Iterator[_Copies]:
        """The checkpoint to copy a part of this worker to; with the last part the thread gets it."""
        started = time.perf_counter()
        if batch not in self._under_way:
            # One is written at a time: a disk that cannot keep up slows the run, it does not fill the memory.
            self.close()
            places = self._free.pop() if self._free else {}
            self._under_way[batch] = _Copies({*self.worker.replicas, "worker"}, places)
        copies = self._under_way[batch]
        yield copies
        copies.stopped_s += time.perf_counter() - started
        copies.waiting.discard(part)
        if copies.waiting:
            return
        del self._under_way[batch]
        copied = torch.cuda.Event() if self.worker.world.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if copied is not None:
            copied.record()
        self._last_step = batch + 1
        job = (self._thread, batch + 1, copies, copied)
        self._thread = threading.Thread(target=self._run, args=job, name="checkpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits until everything that was handed to the thread is written."""
        if self._thread is None or not self._thread.is_alive():
            return
        with self._patience():
            self._thread.join(self._limit_s)
        if self._thread.is_alive():
            raise RunError(
                f"a checkpoint was not written within {self._limit_s:g} s",
                f"look at the disk of {self.folder}, or give more with --save-timeout",
            )

    def _copy(self, tensors: Tensors, copies: _Copies) -> None:
        """Copies tensors into memory of the host that is kept for them."""
        for key, tensor in tensors.items():
            place = copies.places.get(key)
            if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
                pinned = self.worker.world.device.type == "cuda"
                place = copies.places[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            place.copy_(tensor.detach(), non_blocking=True)
            copies.tensors[key] = place

    def _run(
        self, before: threading.Thread | None, step: int, copies: _Copies, copied: torch.cuda.Event | None
    ) -> None:
        """Writes a checkpoint, after the one before."""
        if before is not None:
            before.join()
        started, fault, slow = time.perf_counter(), None, None
        try:
            if copied is not None:
                copied.synchronize()
            slow = self._write(step, copies)
        except BaseException as failure:  # the run goes on with the checkpoints that it has
            fault = reason(failure)
        self._news.put(_Saved(step, time.perf_counter() - started, copies.stopped_s, fault, slow))
        self._free.append(copies.places)

    def _write(self, step: int, copies: _Copies) -> str | None:
        """Writes a checkpoint together with all others, raises on all where one cannot; says whose disk is slow."""
        world, path, copier = self.worker.world, path_of(self.folder, step), self.copier

        def write() -> list[Any]:
            started = time.perf_counter()
            for key, tensor in copies.tensors.items():
                if key.startswith("model/") and not bool(torch.isfinite(tensor).all()):
                    raise CheckpointError(f"{key.removeprefix('model/')} has numbers that are not finite")
            return [copies.about, write_part(path, world.worker, copies.tensors), time.perf_counter() - started]

        def end() -> None:
            if world.worker == 0:
                finish(path, self._about(step, abouts), parts)
                self._good.add(path.name)
                if self._may_prune():
                    prune(self.folder, self.keep, self._good, copier.under_way if copier is not None else None)

        abouts, parts, seconds = zip(*together(write, self._group, world.size))
        try:
            together(end, self._group, world.size)
        finally:
            if world.worker == 0:
                shutil.rmtree(unfinished(path), ignore_errors=True)
        # All have to begin with a copy of the same one.
        if copier is not None and all(together(lambda: copier.under_way is None, self._group, world.size)):
            copier.begin(path, may_prune=self._may_prune())
        slowest = seconds.index(max(seconds))
        is_slow = seconds[slowest] > max(1.0, 2 * sorted(seconds)[(len(seconds) - 1) // 2])
        return f"the part of worker {slowest} took {seconds[slowest]:.1f} s" if is_slow else None

    def _about(self, step: int, told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        plan, settings = self.worker.plan, self.worker.settings
        return {
            "step": step, "run": self.run, "model": plan.model, "placement": plan.placement, "batch": plan.batch,
            "versions": list(plan.versions), "seed": settings.seed, "precision": settings.precision,
            "optimizer": next((each["optimizer"] for each in told if each["optimizer"]), None),
            "loss_scale": told[0]["loss_scale"], "aliases": self._aliases,
            **{key: {name: value for each in told for name, value in each[key].items()} for key in _BY_NAME},
            "scheduler": next((each["scheduler"] for each in told if each["scheduler"]), {}),
        }  # fmt: skip

    def news(self) -> Iterator[_Saved]:
        """What became of the checkpoints since the last time."""
        while not self._news.empty():
            yield self._news.get()


def _outside_stages(layered: Layered) -> tuple[Tensors, dict[str, str]]:
    """What the whole model has that no stage does: tensors that nothing uses, and second names of tied ones."""
    layered.load_rest("cpu")
    used = {id(tensor) for tensor in layered.stage(0, layered.num_layers).state_dict(keep_vars=True).values()}
    tensors: Tensors = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in layered.model.state_dict(keep_vars=True).items():
        if id(tensor) not in used:
            tensors[f"model/{name}"] = tensor.detach()
        elif first.setdefault(id(tensor), name) != name:
            aliases[name] = first[id(tensor)]
    return tensors, aliases
