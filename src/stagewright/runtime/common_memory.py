"""Memory that several workers of one host have in common: each owns a part, and all see all parts.

    worker 0    own ──────┐        ┌── worker 1's
    worker 1    worker 0's ┘        └── own

A part is memory without a name (memfd): it is found through /proc by those who know its owner, and is gone with the
last of them, however they end. Workers of emulated hosts have networks of their own, and nothing in common.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.runtime.world import gather_json

PROBE_BYTES = mmap.PAGESIZE


def is_common(group: dist.ProcessGroup, size: int) -> bool:
    """Whether the members of a group can see each other's memory. All of them must ask."""
    identities = gather_json(identity(), group, size)
    if None in identities or len(set(identities)) > 1:
        return False
    works = torch.ones(1)
    try:
        common_parts(PROBE_BYTES, group, size)
    except OSError:  # some systems hide processes from one another
        works.zero_()
    dist.all_reduce(works, dist.ReduceOp.MIN, group=group)
    return bool(works)


def identity() -> str | None:
    """What workers have in common that see the same machine, processes and network; None where there is no memfd."""
    if not hasattr(os, "memfd_create"):
        return None
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.readlink('/proc/self/ns/net')} {os.geteuid()}"
    return None


def common_parts(num_bytes: int, group: dist.ProcessGroup, size: int) -> list[Tensor]:
    """So many bytes of each member of a group, in its order, this worker's own among them. All of them must ask."""
    file = os.memfd_create("stagewright")
    try:
        os.ftruncate(file, num_bytes)
        told = gather_json([os.getpid(), file], group, size)
        fault = None
        try:
            parts = [mapped(f"/proc/{process}/fd/{number}", num_bytes) for process, number in told]
        except OSError as raised:
            fault = raised
        dist.barrier(group=group)  # files stay open until all have them
    finally:
        os.close(file)
    if fault is not None:
        raise fault
    return parts


def mapped(path: str, num_bytes: int) -> Tensor:
    """The bytes of a file as a tensor, common to all who map it."""
    file = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
    finally:
        os.close(file)
