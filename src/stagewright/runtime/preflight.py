"""What must be right before workers are started: looked at all at once, and told in one list."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from stagewright.cluster import count
from stagewright.errors import StagewrightError, UsageError
from stagewright.models import Layered, parameter_counts
from stagewright.plan import Plan
from stagewright.runtime.settings import Settings
from stagewright.schedule import Schedule
from stagewright.scheduling import check_schedule

GIB = 1 << 30
CLOCKS_APART_S = 5.0
"""How far the clocks of two hosts may be apart; asking takes a while too."""
ASK_S = 60.0


def check_before_launch(
    schedule: Schedule, layered: Layered, settings: Settings, folder: Path, *, states: int, keep: int | None
) -> None:
    """Refuses a run that cannot work, with everything that is wrong with it.

    `states` is how many numbers the optimizer keeps for each parameter, `keep` how many checkpoints there will be.
    """
    sizes = stage_bytes(schedule.plan, layered, settings)
    found = [
        *wrong_schedule(schedule),
        *too_little_memory(schedule.plan, sizes, settings, states),
        *unwritable(folder),
        *(too_little_disk(schedule.plan, sizes, folder, states, keep) if keep else ()),
    ]
    refuse(found)


def refuse(found: Sequence[str]) -> None:
    """Raises one error for all that was found, if anything was."""
    if len(found) == 1:
        raise UsageError(found[0])
    if found:
        lines = "\n".join(f"{number}. {line}" for number, line in enumerate(found, 1))
        raise UsageError(f"the run cannot start: {count(len(found), 'thing')} must be put right first", lines)


def wrong_schedule(schedule: Schedule) -> list[str]:
    """What the check of the schedule says."""
    try:
        check_schedule(schedule)
    except StagewrightError as fault:
        return [fault.what]
    return []


def stage_bytes(plan: Plan, layered: Layered, settings: Settings) -> list[int]:
    """The bytes of each stage's parameters."""
    size = 8 if settings.precision == "fp64" else 4
    counts, sizes, first = parameter_counts(layered), [], 0
    for stage in plan.stages:
        sizes.append(size * sum(counts[first : first + len(stage.layers)]))
        first += len(stage.layers)
    return sizes


def too_little_memory(plan: Plan, sizes: Sequence[int], settings: Settings, states: int) -> list[str]:
    """Devices whose memory cannot even hold weights, gradients and the optimizer's state."""
    needed = [0] * len(plan.devices)
    for stage, members, size in zip(plan.stages, plan.workers, sizes):
        reduced = stage.versions if len(members) > 1 else 0
        for worker in members:
            needed[worker] += size * (stage.versions + states + 1 + reduced)
    if settings.device == "cpu":
        have = available_memory()
        return [] if sum(needed) <= have else [memory_word("the workers together need", sum(needed), "this host", have)]
    cards = max(1, torch.cuda.device_count())
    share = -(-len(plan.devices) // cards)
    have = torch.cuda.get_device_properties(0).total_memory // share if torch.cuda.is_available() else 0
    words = zip(plan.devices, needed)
    return [memory_word(f"the stages on {id} need", size, "it", have) for id, size in words if size > have]


def memory_word(who: str, needed: int, where: str, have: int) -> str:
    """How much is needed and how much is there."""
    return (
        f"{who} {needed / GIB:.1f} GiB for weights, gradients and optimizer alone, {where} has {have / GIB:.1f} GiB: "
        "use more devices, or fewer versions"
    )


def available_memory() -> int:
    """The bytes of memory that this host can give."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 1 << 62


def unwritable(folder: Path) -> list[str]:
    """Whether files can be made in the run's folder."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as fault:
        return [f"the run's folder {folder} cannot be written to: {fault.strerror}"]
    return []


def checkpoint_bytes(plan: Plan, sizes: Sequence[int], states: int) -> int:
    """What one checkpoint takes: every version, and what the optimizer keeps."""
    return sum(size * (stage.versions + states) for stage, size in zip(plan.stages, sizes))


def too_little_disk(plan: Plan, sizes: Sequence[int], folder: Path, states: int, keep: int) -> list[str]:
    """Whether the checkpoints that are kept, and the one being written, have room."""
    needed, free = (keep + 1) * checkpoint_bytes(plan, sizes, states), shutil.disk_usage(folder).free
    if needed <= free:
        return []
    return [
        f"{keep} checkpoints and the one being written take {needed / GIB:.2f} GiB, {folder} has {free / GIB:.2f} GiB "
        "left: use a smaller --keep, or another folder"
    ]


# Other hosts


def facts(paths: Sequence[str], port: int | None) -> dict[str, Any]:
    """What hosts must agree on: versions, the clock, which files they see, and whether a port is free."""
    return {
        "stagewright": version("stagewright"), "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:2])),
        "time": time.time(), "missing": [path for path in paths if not Path(path).exists()],
        "port_is_free": port is None or is_free(port),
    }  # fmt: skip


def is_free(port: int) -> bool:
    """Whether nobody listens on a port."""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def check_hosts(
    hosts: Sequence[str], paths: Sequence[str], port: int, ask: Callable[[str, Sequence[str]], list[str]]
) -> None:
    """Asks every host for its facts, side by side, and refuses what does not fit together.

    `ask` makes the command that runs a Python module with arguments on a host.
    """
    running = []
    for host in hosts:
        command = ask(host, ["stagewright.runtime.preflight", str(port if host == hosts[0] else 0), *paths])
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    refuse(list(differences(hosts, [answer(process) for process in running], port)))


def answer(process: subprocess.Popen[str]) -> dict[str, Any] | str:
    """A host's facts, with how far its clock is from ours, or why there are none."""
    try:
        out, err = process.communicate(timeout=ASK_S)
        told: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        told["clock_s"] = told.pop("time") - time.time()
        return told
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"it did not answer within {ASK_S:g} s"
    except (ValueError, IndexError, KeyError, AttributeError):
        return (err.strip().splitlines() or [f"it ended with status {process.returncode}"])[-1]


def differences(hosts: Sequence[str], told: Sequence[dict[str, Any] | str], port: int) -> Iterable[str]:
    """What is wrong with the hosts' facts, one line each."""
    known = {host: each for host, each in zip(hosts, told) if isinstance(each, dict)}
    for host, each in zip(hosts, told):
        if isinstance(each, str):
            yield f"host {host} cannot be asked: {each}"
    for what in ("stagewright", "torch", "python"):
        found = {host: each[what] for host, each in known.items()}
        if len(set(found.values())) > 1:
            yield f"{what} is not the same everywhere: {named(found)}"
    clocks = {host: each["clock_s"] for host, each in known.items()}
    if clocks and max(clocks.values()) - min(clocks.values()) > CLOCKS_APART_S:
        yield f"the clocks are apart: {named({host: f'{value:+.0f} s' for host, value in clocks.items()})}"
    for host, each in known.items():
        for path in each["missing"]:
            yield f"host {host} has no {path}"
        if not each["port_is_free"]:
            yield f"port {port} of host {host} is taken"


def named(found: Mapping[str, object]) -> str:
    """Values with their hosts."""
    return ", ".join(f"{value} on {host}" for host, value in found.items())


if __name__ == "__main__":
    print(json.dumps(facts(sys.argv[2:], int(sys.argv[1]) or None)))
