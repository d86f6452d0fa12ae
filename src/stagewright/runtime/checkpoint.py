"""Checkpoints of a running worker: copied between two steps, written by a thread, found again and restored.

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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stagewright.errors import CheckpointError
from stagewright.models import Layered
from stagewright.runtime.snapshot import (
    Tensors,
    random_tensors,
    restore_random,
    restore_stage,
    stage_buffers,
    stage_numbers,
    stage_tensors,
    wanted_keys,
)
from stagewright.runtime.storage import NAME, OF_NAME, PART, PartReader, PartWriter, read_manifest
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import gather_json

FOLDER = "checkpoints"
"""Where a run's folder keeps them."""
LONGEST_WRITE = timedelta(minutes=30)
ALONE = "torch.distributed is disabled, unavailable or uninitialized"


def path_of(run_folder: Path, step: int) -> Path:
    """The folder of the checkpoint after so many steps."""
    return run_folder / FOLDER / f"step-{step:08d}"


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, or in the folder of a run, newest first; good or not."""
    inside = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    if not inside.is_dir():
        return []
    found = [(int(match[1]), entry) for entry in inside.iterdir() if (match := NAME.fullmatch(entry.name))]
    return [entry for _, entry in sorted(found, reverse=True)]


def find_checkpoint(folder: Path, tell: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """The newest good checkpoint with its manifest; `folder` is a checkpoint itself, or where they are.

    Of those that are torn or damaged `tell` hears why they are passed over.
    """
    candidates = [folder] if NAME.fullmatch(folder.name) else checkpoints_in(folder)
    for candidate in candidates:
        try:
            return candidate, read_manifest(candidate)
        except CheckpointError as fault:
            tell(f"{fault.what}; it is passed over")
    return None


def sweep(run_folder: Path) -> None:
    """Removes what a killed run left half written."""
    for entry in (run_folder / FOLDER).glob(".step-*.part"):
        if PART.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)


def prune(run_folder: Path, keep: int) -> None:
    """Removes all checkpoints but the newest ones."""
    for old in checkpoints_in(run_folder)[keep:]:
        # First it loses its name: half removed, it must not be taken for one.
        doomed = old.with_name(f".{old.name}.part")
        shutil.rmtree(doomed, ignore_errors=True)
        old.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


@dataclass(frozen=True)
class Saved:
    """What became of one checkpoint."""

    step: int
    seconds: float
    stopped_s: float
    """How long training stood still for it."""
    fault: str | None = None

    def __str__(self) -> str:
        if self.fault is None:
            still = f"training stood still for {self.stopped_s * 1e3:.1f} ms"
            return f"step {self.step} saved in {self.seconds:.2f} s, {still}"
        return f"step {self.step} could not be saved: {self.fault}"


@dataclass
class Copies:
    """A checkpoint on its way from the stages to the thread."""

    waiting: set[int | str]
    places: Tensors
    """Memory of the host to copy to, from checkpoint to checkpoint the same."""
    tensors: Tensors = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=lambda: {"stages": {}})
    stopped_s: float = 0.0


class Checkpointer:
    """Copies a worker's state when it is due, and has a thread write it. All workers must make one."""

    def __init__(self, worker: Worker, layered: Layered, folder: Path, *, every: int | None, keep: int) -> None:
        self.worker, self.folder, self.every, self.keep = worker, folder, every, keep
        world = worker.world
        wait = max(world.timeout, LONGEST_WRITE)
        self.group = dist.new_group(timeout=wait, backend="gloo") if world.size > 1 else None
        self.left_over, self.aliases = outside_stages(layered) if world.worker == 0 else ({}, {})
        self.last_step: int | None = None
        """The last step that was handed to the thread."""
        self._under_way: dict[int, Copies] = {}
        self._free: list[Tensors] = []
        self._jobs: queue.Queue[tuple[int, Copies, Any] | None] = queue.Queue()
        self._news: queue.SimpleQueue[Saved] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        warnings.filterwarnings("ignore", message=ALONE)  # one worker saves without a process group, and means it

    def is_due(self, batch: int) -> bool:
        """Whether a checkpoint follows the update of a batch."""
        return self.every is not None and (batch + 1) % self.every == 0

    def note_stage(self, stage: int, batch: int) -> None:
        """Copies a stage that has just been updated, where a checkpoint is due."""
        if self.is_due(batch):
            started = time.perf_counter()
            copies, here = self._copies(batch), self.worker.hosted[stage]
            self._copy(own_share(stage_tensors(here), here.replica, len(self.worker.plan.workers[stage])), copies)
            if here.replica == 0:
                self._copy(stage_buffers(here), copies)
                copies.about["stages"][str(stage)] = stage_numbers(here)
            copies.stopped_s += time.perf_counter() - started
            self._advance(stage, batch)

    def note_worker(self, batch: int) -> None:
        """Adds what a worker has beside its stages."""
        if self.is_due(batch):
            started = time.perf_counter()
            copies, world = self._copies(batch), self.worker.world
            self._copy({**random_tensors(world.worker, world.device), **self.left_over}, copies)
            copies.about["loss_scale"] = list(self.worker.scale.saved(batch + 1))
            copies.stopped_s += time.perf_counter() - started
            self._advance("worker", batch)

    def save(self, step: int) -> None:
        """Copies everything as it is now, between two stretches, unless this very step was saved before."""
        if self.last_step == step:
            return
        every, self.every = self.every, step
        for stage in self.worker.hosted:
            self.note_stage(stage, step - 1)
        self.note_worker(step - 1)
        self.every = every

    def _copies(self, batch: int) -> Copies:
        if batch not in self._under_way:
            # One is written at a time: a disk that cannot keep up slows the run, it does not fill the memory.
            self._jobs.join()
            self._under_way[batch] = Copies({*self.worker.hosted, "worker"}, self._free.pop() if self._free else {})
        return self._under_way[batch]

    def _copy(self, tensors: Tensors, copies: Copies) -> None:
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
        event = None
        if self.worker.world.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
            self._thread.start()
        self.last_step = batch + 1
        self._jobs.put((batch + 1, copies, event))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            step, copies, event = job
            started, fault = time.perf_counter(), None
            try:
                if event is not None:
                    event.synchronize()
                self._write(step, copies)
            except BaseException as failure:  # the run goes on with the checkpoints that it has
                fault = reason(failure)
                self._clean(step)
            self._news.put(Saved(step, time.perf_counter() - started, copies.stopped_s, fault))
            self._free.append(copies.places)
            self._jobs.task_done()
        self._jobs.task_done()

    def _write(self, step: int, copies: Copies) -> None:
        world = self.worker.world
        told = gather_json(copies.about, self.group, world.size)
        writer = PartWriter(path_of(self.folder, step), world.worker, self._about(step, told))
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        alone = self.group is None
        save(copies.tensors, storage_writer=writer, planner=planner, process_group=self.group, no_dist=alone)
        if world.worker == 0:
            prune(self.folder, self.keep)

    def _about(self, step: int, told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        plan, settings = self.worker.plan, self.worker.settings
        stages = [stage for each in told for stage in each["stages"].values()]
        return {
            "step": step, "model": plan.model, "placement": plan.placement, "batch": plan.batch,
            "versions": list(plan.versions), "seed": settings.seed, "precision": settings.precision,
            "loss_scale": told[0]["loss_scale"], "aliases": self.aliases,
            "numbers": {name: value for stage in stages for name, value in stage["numbers"].items()},
            "options": {name: value for stage in stages for name, value in stage["options"].items()},
            "scheduler": next((stage["scheduler"] for stage in stages if stage["scheduler"]), {}),
        }  # fmt: skip

    def _clean(self, step: int) -> None:
        if self.worker.world.worker == 0:
            path = path_of(self.folder, step)
            shutil.rmtree(path.with_name(f".{path.name}.part"), ignore_errors=True)

    def news(self) -> Iterator[Saved]:
        """What became of the checkpoints since the last time."""
        while not self._news.empty():
            yield self._news.get()

    def close(self) -> None:
        """Waits until everything is written."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None


def own_share(tensors: Tensors, replica: int, num_replicas: int) -> Tensors:
    """The tensors that this replica saves: all replicas hold the same ones and share the work by size."""
    loads, mine = [0] * num_replicas, {}
    for key in sorted(tensors):
        owner = loads.index(min(loads))
        loads[owner] += tensors[key].numel() * tensors[key].element_size()
        if owner == replica:
            mine[key] = tensors[key]
    return mine


def outside_stages(layered: Layered) -> tuple[Tensors, dict[str, str]]:
    """What the whole model has that no stage does: tensors that nothing uses, and second names of tied ones."""
    used = {
        id(tensor): name for name, tensor in layered.stage(0, layered.num_layers).state_dict(keep_vars=True).items()
    }
    tensors, aliases = {}, {}
    for name, tensor in layered.model.state_dict(keep_vars=True).items():
        if id(tensor) not in used:
            tensors[f"model/{name}"] = tensor.detach()
        elif used[id(tensor)] != name:
            aliases[name] = used[id(tensor)]
    return tensors, aliases


def reason(failure: BaseException) -> str:
    """Why a checkpoint could not be written, in a line."""
    failures = getattr(failure, "failures", None)
    cause = next(iter(failures.values()))[0] if failures else failure
    lines = str(cause).strip().splitlines() or [""]
    return f"{type(cause).__name__}: {lines[0]}"


# Resuming


def restore(worker: Worker, folder: Path, manifest: Mapping[str, Any], *, options: bool) -> int:
    """Puts a worker where a checkpoint stands, and returns the step; all workers must call it."""
    check_fits(worker, manifest)
    known, step, world = manifest["tensors"], manifest["step"], worker.world
    same = manifest["placement"] == worker.plan.placement
    randoms = [key for key in known if same and key.startswith(f"random/{world.worker}/")]
    wanted = {stage: wanted_keys(here, known) for stage, here in worker.hosted.items()}
    keys = {key for each in wanted.values() for key in each.values()}.union(randoms)
    tensors = {key: empty(known[key]) for key in sorted(keys)}
    read(tensors, folder, manifest, world.control)
    for stage, here in worker.hosted.items():
        own = {key: tensors[source] for key, source in wanted[stage].items()}
        restore_stage(here, step, own, manifest, options=options)
    restore_random(world.worker, world.device, tensors)
    if worker.scale.is_on:
        worker.scale.restore(int(step), *manifest["loss_scale"])
    return int(step)


def check_fits(worker: Worker, manifest: Mapping[str, Any]) -> None:
    """Refuses a checkpoint whose data position means something else here."""
    for key, here in (("model", worker.plan.model), ("batch", worker.plan.batch), ("seed", worker.settings.seed)):
        if manifest[key] != here:
            option = f", or go on with --{key} {manifest[key]}" if key != "model" else ""
            raise CheckpointError(
                f"the checkpoint is of a run with {key} {manifest[key]}, this one has {here}",
                f"start anew without --resume{option}",
            )


def empty(entry: Mapping[str, Any]) -> Tensor:
    """A tensor to read an entry of a manifest into."""
    return torch.empty(entry["shape"], dtype=OF_NAME[entry["dtype"]])


def read(tensors: Tensors, folder: Path, manifest: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Fills tensors from a checkpoint."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    alone = group is None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=ALONE)
        load(tensors, storage_reader=PartReader(folder, manifest), planner=planner, process_group=group, no_dist=alone)


def whole_model(folder: Path) -> tuple[Tensors, dict[str, Any]]:
    """The unsplit model's tensors under its own names, of a good checkpoint, and the manifest."""
    manifest = read_manifest(folder)
    tensors = {key: empty(entry) for key, entry in manifest["tensors"].items() if key.startswith("model/")}
    read(tensors, folder, manifest, None)
    named = {key.removeprefix("model/"): tensor for key, tensor in tensors.items()}
    named.update({name: named[of] for name, of in manifest["aliases"].items()})
    return named, manifest
