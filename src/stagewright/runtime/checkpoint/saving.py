"""Saving checkpoints of a running worker: copied between two steps, written by a thread.

    step     299      300         301         302
    worker   … U      U [copy]    F B U       F B U        the copy is all that training waits for
    thread                [ write, hash, fsync, rename ]

Each stage is copied right after its own update, so that stages which are at different batches at the same moment are
saved at the same one. What is in flight then need not be saved: a resumed run computes it again from the versions.
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.errors import CheckpointError, RunError, StagewrightError
from stagewright.models import Layered
from stagewright.runtime.checkpoint.snapshot import (
    optimizer_name,
    random_tensors,
    stage_buffers,
    stage_numbers,
    stage_tensors,
)
from stagewright.runtime.checkpoint.storage import Tensors, finish, read_manifest, unfinished, write_part
from stagewright.runtime.run_folder import checkpoints_in, path_of
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import gather_json


def sweep(run_folder: Path) -> None:
    """Removes what a killed run left half written."""
    for entry in path_of(run_folder, 0).parent.glob(".step-*.part"):
        shutil.rmtree(entry, ignore_errors=True)


def _prune(run_folder: Path, keep: int, good: set[str]) -> None:
    """Removes the run's own checkpoints that are older than the newest good ones, of which it keeps some.

    `good` has the names of those that are known to be good, and gets those that are found to be.
    """
    kept = 0
    for path in checkpoints_in(run_folder, own=True):
        if kept >= keep:
            doomed = unfinished(path)  # half removed, it must not be taken for one
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        elif path.name in good or _is_good(path):
            good.add(path.name)
            kept += 1


def _is_good(path: Path) -> bool:
    """Whether every file of a checkpoint is as it was written."""
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


@dataclass(frozen=True)
class _Saved:
    """What became of one checkpoint."""

    step: int
    seconds: float
    stopped_s: float
    """How long training stood still for it."""
    fault: str | None = None
    warning: str | None = None

    def __str__(self) -> str:
        if self.fault is not None:
            return f"step {self.step} could not be saved: {self.fault}"
        text = f"step {self.step} saved in {self.seconds:.2f} s, training stood still for {self.stopped_s * 1e3:.1f} ms"
        return f"{text}; {self.warning}" if self.warning else text


@dataclass
class _Copies:
    """A checkpoint on its way from the stages to the thread."""

    waiting: set[int | str]
    places: Tensors
    """Memory of the host to copy to, from checkpoint to checkpoint the same."""
    tensors: Tensors = field(default_factory=dict)
    sums: Tensors = field(default_factory=dict)
    """For each stage the sum of its weights' bits, which all replicas have in common."""
    about: dict[str, Any] = field(default_factory=lambda: {"stages": {}})
    stopped_s: float = 0.0


class Checkpointer:
    """Copies a worker's state when it is due, and has a thread write it. All workers must make one."""

    def __init__(
        self, worker: Worker, layered: Layered, folder: Path, *, every: int | None, keep: int, run: str | None = None,
        patience: Callable[[], AbstractContextManager[None]] = nullcontext,
        may_prune: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self.worker, self.folder, self.every, self.keep, self.run = worker, folder, every, keep, run
        world = worker.world
        self._limit_s = worker.settings.save_timeout_s
        wait = max(world.timeout, timedelta(seconds=self._limit_s))
        self.group = dist.new_group(timeout=wait, backend="gloo") if world.size > 1 else None
        self.left_over, self.aliases = _outside_stages(layered) if world.worker == 0 else ({}, {})
        self.last_step: int | None = None
        """The last step that was handed to the thread."""
        self._patience, self._may_prune = patience, may_prune
        """What holds while this worker waits for the disk; whether what is saved now is worth more than what was."""
        self._good: set[str] = set()
        self._warned: set[str] = set()
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
        if self.is_due(batch):
            copies = self._copies(batch)
            started, here = time.perf_counter(), self.worker.replicas[stage]
            self._copy(_own_share(stage_tensors(here), here.replica, len(self.worker.plan.workers[stage])), copies)
            copies.sums[str(stage)] = _sum_of_bits(here.weights.newest().parameters())
            if here.replica == 0:
                self._copy(stage_buffers(here), copies)
                copies.about["stages"][str(stage)] = stage_numbers(here)
            copies.stopped_s += time.perf_counter() - started
            self._advance(stage, batch)

    def note_worker(self, batch: int) -> None:
        """Adds what a worker has beside its stages."""
        if self.is_due(batch):
            copies, world = self._copies(batch), self.worker.world
            started = time.perf_counter()
            self._copy({**random_tensors(world.worker, world.device), **self.left_over}, copies)
            copies.about["loss_scale"] = list(self.worker.scale.saved(batch + 1))
            copies.about["optimizer"] = optimizer_name(self.worker.replicas.values())
            copies.stopped_s += time.perf_counter() - started
            self._advance("worker", batch)

    def save(self, step: int) -> None:
        """Copies everything as it is now, between two stretches, unless this very step was saved before."""
        if self.last_step == step:
            return
        every, self.every = self.every, step
        for stage in self.worker.replicas:
            self.note_stage(stage, step - 1)
        self.note_worker(step - 1)
        self.every = every

    def _copies(self, batch: int) -> _Copies:
        if batch not in self._under_way:
            # One is written at a time: a disk that cannot keep up slows the run, it does not fill the memory.
            started = time.perf_counter()
            self.close()
            copies = _Copies({*self.worker.replicas, "worker"}, self._free.pop() if self._free else {})
            copies.stopped_s = time.perf_counter() - started
            self._under_way[batch] = copies
        return self._under_way[batch]

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

    def _advance(self, part: int | str, batch: int) -> None:
        copies = self._under_way[batch]
        copies.waiting.discard(part)
        if copies.waiting:
            return
        del self._under_way[batch]
        copied = torch.cuda.Event() if self.worker.world.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if copied is not None:
            copied.record()
        self.last_step = batch + 1
        job = (self._thread, batch + 1, copies, copied)
        self._thread = threading.Thread(target=self._run, args=job, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(
        self, before: threading.Thread | None, step: int, copies: _Copies, copied: torch.cuda.Event | None
    ) -> None:
        """Writes a checkpoint, after the one before."""
        if before is not None:
            before.join()
        started, fault, warning = time.perf_counter(), None, None
        try:
            if copied is not None:
                copied.synchronize()
            warning = self._write(step, copies)
        except BaseException as failure:  # the run goes on with the checkpoints that it has
            fault = _reason(failure)
        self._news.put(_Saved(step, time.perf_counter() - started, copies.stopped_s, fault, warning))
        self._free.append(copies.places)

    def _write(self, step: int, copies: _Copies) -> str | None:
        """Writes a checkpoint together with all other workers; returns a warning, raises on all where one cannot."""
        world, path = self.worker.world, path_of(self.folder, step)
        bits = {stage: int(number) for stage, number in copies.sums.items()}
        told = self._together(lambda: [copies.about, bits, self._write_part(path, copies.tensors)])
        abouts, sums, parts = zip(*told)

        def end() -> None:
            if world.worker == 0:
                finish(path, self._about(step, abouts), parts)
                self._good.add(path.name)
                if self._may_prune():
                    _prune(self.folder, self.keep, self._good)

        try:
            self._together(end)
        finally:
            if world.worker == 0:
                shutil.rmtree(unfinished(path), ignore_errors=True)
        return self._differing(sums)

    def _write_part(self, path: Path, tensors: Tensors) -> dict[str, Any]:
        for key, tensor in tensors.items():
            if key.startswith("model/") and not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(f"{key.removeprefix('model/')} has numbers that are not finite")
        return write_part(path, self.worker.world.worker, tensors)

    def _together(self, do: Callable[[], Any]) -> list[Any]:
        """What every worker's call gave; where one failed, all do."""
        try:
            told = {"made": do()}
        except Exception as failure:
            told = {"fault": _reason(failure)}
        every = gather_json(told, self.group, self.worker.world.size)
        fault = next((each["fault"] for each in every if "fault" in each), None)
        if fault is not None:
            raise CheckpointError(fault)
        return [each["made"] for each in every]

    def _differing(self, sums: Sequence[Mapping[str, int]]) -> str | None:
        """A word on stages whose replicas have come to different weights, once for each stage."""
        for stage, members in enumerate(self.worker.plan.workers):
            key = str(stage)
            other = next((worker for worker in members if sums[worker][key] != sums[members[0]][key]), None)
            if other is not None and key not in self._warned:
                self._warned.add(key)
                return (
                    f"workers {members[0]} and {other} have different weights of stage {stage}, to the bit: devices of "
                    "one kind should not"
                )
        return None

    def _about(self, step: int, told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        plan, settings = self.worker.plan, self.worker.settings
        stages = [stage for each in told for stage in each["stages"].values()]
        return {
            "step": step, "run": self.run, "model": plan.model, "placement": plan.placement, "batch": plan.batch,
            "versions": list(plan.versions), "seed": settings.seed, "precision": settings.precision,
            "optimizer": next((each["optimizer"] for each in told if each["optimizer"]), None),
            "loss_scale": told[0]["loss_scale"], "aliases": self.aliases,
            "numbers": {name: value for stage in stages for name, value in stage["numbers"].items()},
            "options": {name: value for stage in stages for name, value in stage["options"].items()},
            "scheduler": next((stage["scheduler"] for stage in stages if stage["scheduler"]), {}),
        }  # fmt: skip

    def news(self) -> Iterator[_Saved]:
        """What became of the checkpoints since the last time."""
        while not self._news.empty():
            yield self._news.get()


def _own_share(tensors: Tensors, replica: int, num_replicas: int) -> Tensors:
    """The tensors that this replica saves: all replicas hold the same ones and share the work by size."""
    loads, mine = [0] * num_replicas, {}
    for key in sorted(tensors):
        owner = loads.index(min(loads))
        loads[owner] += tensors[key].numel() * tensors[key].element_size()
        if owner == replica:
            mine[key] = tensors[key]
    return mine


def _outside_stages(layered: Layered) -> tuple[Tensors, dict[str, str]]:
    """What the whole model has that no stage does: tensors that nothing uses, and second names of tied ones."""
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


@torch.no_grad()
def _sum_of_bits(tensors: Iterable[Tensor]) -> Tensor:
    """The bits of some tensors, added up as whole numbers: the same for the same numbers in any order."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = [tensor.detach().view(kinds[tensor.element_size()]) for tensor in tensors if tensor.numel()]
    found = [each.sum(dtype=torch.int64) for each in bits]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.int64)


def _reason(failure: BaseException) -> str:
    """Why a checkpoint could not be written, in a line."""
    if isinstance(failure, StagewrightError):
        return failure.what
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0]}"
