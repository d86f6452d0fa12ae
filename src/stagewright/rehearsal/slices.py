"""Slices of one card: eight workers that share it under CUDA MPS play the part of eight cards."""

from __future__ import annotations

import re
import shutil

import torch

from stagewright.cluster import Cluster, Device, Host, Link
from stagewright.errors import UsageError
from stagewright.runtime.launch.mps import CONTROL

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def check_card(slices: int) -> None:
    """Refuses to begin where there is no card, or nothing to cut it with."""
    if not 2 <= slices <= 48:  # as many as MPS lets share a card
        raise UsageError(f"--slices is {slices}: expected 2 to 48")
    if not torch.cuda.is_available():
        raise UsageError("--slices cuts a card, and no CUDA card was found here", "use --cluster FILE to emulate hosts")
    if shutil.which(CONTROL) is None:
        raise UsageError(
            f"slices need CUDA MPS, and {CONTROL} is not here",
            f"install it, or let workers take turns on the card with `train --share {slices}`",
        )


def read_rate(text: str) -> float:
    """Bytes a second of `1gbit`, `300mbit` or `125e6`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.lower())
    try:
        rate = float(match[1]) * _PREFIXES[match[2]] / 8 if match else float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise UsageError(f"--rate is {text!r}: expected bits such as 1gbit, or bytes a second such as 125e6")
    return rate


def slice_cluster(slices: int, bytes_per_s: float = 1e9) -> Cluster:
    """The hosts of the slices, each with a link to one switch, by default about as fast as loopback, and its memory."""
    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else slices << 30
    own = Link(ends=("0", "nic"), kind="local", bytes_per_s=1e12)  # from a slice to its network card: as good as none
    host = Host(devices=(Device(kind="slice", memory_bytes=memory // slices),), links=(own,))
    links = (
        Link(ends=(f"{number}:nic", "net"), kind="NET", bytes_per_s=bytes_per_s, latency_s=0.0)
        for number in range(slices)
    )
    return Cluster(name=f"{slices} slices", hosts=(host,) * slices, links=tuple(links))
