"""The workers of a run as process groups: who talks to whom, over what."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from stagewright.errors import RunError
from stagewright.profiling.heap import keep_freed_memory
from stagewright.runtime.launch.meeting import Place, choose_interface, meet
from stagewright.runtime.launch.mps import SHARED, become_a_host
from stagewright.runtime.settings import Settings


@dataclass(frozen=True)
class World:
    """This process among the workers of a run.

    control   all workers, on the CPU: figures, agreements of a few numbers, barriers
    everyone  all workers, on the device
    """

    worker: int
    size: int
    device: torch.device
    timeout: timedelta
    control: dist.ProcessGroup | None = None
    everyone: dist.ProcessGroup | None = None
    store: Store | None = None
    """Where workers leave words for one another; None for one worker."""
    places: tuple[Place, ...] = ()
    """For each worker where it runs; nothing for one worker."""
    _groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = field(default_factory=dict)

    def group(self, purpose: str, members: tuple[int, ...], backend: str | None = None) -> dist.ProcessGroup | None:
        """A communicator of its own for a purpose; None for one member. All workers must ask, in the same order."""
        if len(members) < 2:
            return None
        key, backend = (purpose, members), backend or ("nccl" if self.device.type == "cuda" else "gloo")
        if key not in self._groups:
            group = self._groups[key] = dist.new_group(list(members), timeout=self.timeout, backend=backend)
            if backend == "nccl" and self.worker in members:
                # NCCL connects at the first use, which would stop a worker in the middle of a step.
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        return self._groups[key]

    def is_staged(self, settings: Settings) -> bool:
        """Whether what workers on cards exchange goes through pinned memory: where they share cards, unless told."""
        if self.device.type != "cuda":
            return False
        return settings.transport == "staged" or (settings.transport == "auto" and SHARED in os.environ)


class Words:
    """What workers tell one another over the store, signed with the run's secret.

    The store of torchrun takes and gives anything to anyone who reaches its port: what this run's workers did not sign
    is left aside.
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        self._store, self._secret = store, secret

    def put(self, key: str, text: str) -> None:
        """Leaves a word under a key."""
        self._store.set(key, f"{self._sign(key, text)} {text}")

    def get(self, key: str) -> str | None:
        """The word under a key; None where there is none that this run's workers left."""
        if not self._store.check([key]):
            return None
        sign, _, text = self._store.get(key).decode("utf-8", errors="replace").partition(" ")
        return text if hmac.compare_digest(sign.encode(), self._sign(key, text).encode()) else None

    def _sign(self, key: str, text: str) -> str:
        return hmac.new(self._secret, f"{key} {text}".encode(), hashlib.sha256).hexdigest()


@contextmanager
def open_world(settings: Settings) -> Iterator[World]:
    """This process as one of the workers that the launcher named in the environment; closed again at the end."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    become_a_host(rank)
    device = pick_device(settings)
    if device.type == "cpu":
        keep_freed_memory()
    else:
        # Python lets a thread run for 5 ms before another may: too long for those that pass rows on to a card.
        sys.setswitchinterval(0.0005)
    # Whoever does not get on is ended by its watchdog; a wait for one that saves may take as long as saving may.
    timeout = timedelta(seconds=settings.timeout_s + settings.save_timeout_s)
    if size == 1:
        yield World(rank, size, device, timeout)
        return
    store, places = meet(rank, size, settings.start_timeout_s)
    choose_interface(places, rank)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    everyone = dist.group.WORLD
    if device.type == "cuda":
        everyone = dist.new_group(list(range(size)), timeout=timeout, backend="nccl")
    yield World(rank, size, device, timeout, dist.group.WORLD, everyone, store, tuple(places))
    # Not after an error: closing would wait for workers that wait for this one, and the launcher ends them all.
    dist.destroy_process_group()
    _let_threads_finish()


def _let_threads_finish(timeout_s: float = 1.0) -> None:
    """Returns once all other threads of this process sleep, or after a while.

    A thread of gloo lets go of its last tensors a moment after the work is done, and needs Python for that: where the
    process is ending already, this ends it with an abort. Linux tells which threads still have something to do.
    """
    deadline, quiet = time.monotonic() + timeout_s, 0
    while quiet < 3 and time.monotonic() < deadline:
        time.sleep(0.001)  # whoever waits for Python gets it meanwhile
        others = [entry for entry in Path("/proc/self/task").glob("*") if int(entry.name) != threading.get_native_id()]
        quiet = 0 if any(map(_is_running, others)) else quiet + 1


def _is_running(thread: Path) -> bool:
    """Whether Linux says that a thread has something to do."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:  # it has ended meanwhile
        return False


def pick_device(settings: Settings) -> torch.device:
    """The device of this worker: its local rank's card, or one of the cards that the workers share."""
    if settings.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RunError("no CUDA device was found on this host", "use --device cpu, or look at nvidia-smi")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def gather_json(value: object, group: dist.ProcessGroup | None, size: int) -> list[Any]:
    """Every worker's value, at every worker of a group on the CPU."""
    if group is None:
        return [value]
    text = json.dumps(value).encode()
    longest = torch.tensor([len(text)])
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    own = torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8)  # blanks at the end say nothing
    parts = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(parts, own, group=group)
    return [json.loads(part.numpy().tobytes()) for part in parts]
