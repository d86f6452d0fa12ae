"""Several workers on one card: CUDA MPS lets them compute side by side, and to NCCL each is a host of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"
SHARED = "STAGEWRIGHT_WORKERS_A_CARD"
"""The variable that tells workers how many of them share a card."""


@contextmanager
def shared_cards(workers_a_card: int, transport: str = "auto") -> Iterator[dict[str, str]]:
    """The environment for workers that share cards; MPS runs meanwhile, and stops again if it was started here."""
    if workers_a_card < 2:
        yield {}
        return
    environment = {
        SHARED: str(workers_a_card),
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_MAX_NCHANNELS": os.environ.get("NCCL_MAX_NCHANNELS", "2"),
        "NCCL_IB_DISABLE": "1",
        # The kernels of several communicators must fit side by side into a slice of the card, or one that waits for its
        # peer keeps out the very one that the peer waits for: one block a transfer, and no clusters of blocks.
        "NCCL_MAX_P2P_NCHANNELS": "1",
        "NCCL_MIN_P2P_NCHANNELS": "1",
        "NCCL_NCHANNELS_PER_PEER": "1",
        "NCCL_CGA_CLUSTER_SIZE": "0",
    }
    if transport == "nccl":
        # Loading a kernel at its first use waits for all that run, among them receives that wait for their senders.
        # Rows that are staged wait on the host, so that kernels may be loaded when they are needed: 12 s sooner.
        environment["CUDA_MODULE_LOADING"] = os.environ.get("CUDA_MODULE_LOADING", "EAGER")
    if shutil.which(CONTROL) is None:
        yield environment
        return
    with tempfile.TemporaryDirectory(prefix="stagewright-mps-") as folder:
        pipes = {
            "CUDA_MPS_PIPE_DIRECTORY": os.environ.get("CUDA_MPS_PIPE_DIRECTORY", f"{folder}/pipe"),
            "CUDA_MPS_LOG_DIRECTORY": os.environ.get("CUDA_MPS_LOG_DIRECTORY", f"{folder}/log"),
        }
        started = _start(pipes)
        try:
            yield {**environment, **pipes, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // workers_a_card)}
        finally:
            if started:
                _tell("quit", pipes)


def _start(pipes: dict[str, str]) -> bool:
    """Starts MPS unless it answers already; returns whether it was started here."""
    if _tell("get_server_list", pipes) == 0:
        return False
    for folder in pipes.values():
        os.makedirs(folder, exist_ok=True)
    return subprocess.run([CONTROL, "-d"], env={**os.environ, **pipes}, capture_output=True, timeout=30).returncode == 0


def _tell(command: str, pipes: dict[str, str]) -> int:
    """Sends a command to MPS; returns its exit status."""
    try:
        done = subprocess.run(
            [CONTROL], input=command.encode() + b"\n", env={**os.environ, **pipes}, capture_output=True, timeout=30
        )
    except subprocess.TimeoutExpired:
        return 1
    return done.returncode


def become_a_host(worker: int) -> None:
    """Gives this worker a host id of its own where it shares its card, before NCCL looks for it."""
    if SHARED in os.environ:
        os.environ["NCCL_HOSTID"] = f"stagewright-worker-{worker}"
