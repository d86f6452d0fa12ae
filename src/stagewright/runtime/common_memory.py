"""Memory that several workers of one host have in common.

    replica 0   ◀── writes its row ──┐
    replica 1                        ├── all read all rows
    replica 2                        │
    the sum     ◀── a part each ─────┘

It has no name (memfd): it is found through /proc by those who know who made it, and is gone with the last of them,
however they end. Workers of emulated hosts have networks of their own, and nothing in common; slices of a card that
stand for hosts are told so.
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

APART = "STAGEWRIGHT_APART"
"""The variable under which workers have nothing in common, wherever they run."""


def is_common(group: dist.ProcessGroup, size: int) -> bool:
    """Whether the members of a group can see each other's memory. All of them must ask."""
    identities = gather_json(identity(), group, size)
    if None in identities or len(set(identities)) > 1:
        return False
    works = torch.ones(1)
    try:
        _common_bytes(mmap.PAGESIZE, group, size)
    except OSError:  # some systems hide processes from one another
        works.zero_()
    dist.all_reduce(works, dist.ReduceOp.MIN, group=group)
    return bool(works)


def identity() -> str | None:
    """What is the same for workers that see one machine, its processes and its network; None where nothing is."""
    if APART in os.environ or not hasattr(os, "memfd_create"):
        return None
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.readlink('/proc/self/ns/net')} {os.geteuid()}"
    return None


def common_rows(num_rows: int, numel: int, dtype: torch.dtype, group: dist.ProcessGroup, size: int) -> Tensor:
    """Rows of zeros that the members of a group have in common, each on pages of its own. All of them must ask."""
    stride = -(-max(numel, 1) * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    return _common_bytes(num_rows * stride, group, size).view(dtype).view(num_rows, -1)[:, :numel]


def _common_bytes(num_bytes: int, group: dist.ProcessGroup, size: int) -> Tensor:
    """So many bytes that the members of a group have in common: the first makes them, the others find them."""
    is_first = dist.get_rank(group) == 0
    file = os.memfd_create("stagewright") if is_first else None
    try:
        if file is not None:
            os.ftruncate(file, num_bytes)
        process, number = gather_json([os.getpid(), file], group, size)[0]
        fault = None
        try:
            common = _mapped(f"/proc/{process}/fd/{number}", num_bytes)
        except OSError as raised:
            fault = raised
        dist.barrier(group=group)  # the file stays open until all have it
    finally:
        if file is not None:
            os.close(file)
    if fault is not None:
        raise fault
    return common


def _mapped(path: str, num_bytes: int) -> Tensor:
    """The bytes of a file as a tensor, common to all who map it."""
    file = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
    finally:
        os.close(file)


def pin(tensor: Tensor) -> None:
    """Lets a card copy from and to memory that runs straight on while the host does something else."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))  # type: ignore[no-untyped-call]


def unpin(tensor: Tensor) -> None:
    """Takes that back, before the memory goes."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr()))  # type: ignore[no-untyped-call]
