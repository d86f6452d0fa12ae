"""What must be right before workers are started: looked at all at once, and told in one list."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stagewright.cluster import Device, count, format_devices
from stagewright.errors import StagewrightError, UsageError
from stagewright.memory import Memory, StageBytes, in_words, plan_bytes
from stagewright.models import Layered
from stagewright.models.counts import parameter_roles
from stagewright.plan import Plan
from stagewright.profiling.facts import memory_profile
from stagewright.profiling.kinds import find_kind, kind_called
from stagewright.runtime.corrections import CORRECTIONS
from stagewright.runtime.launch.ssh import PORT, OverSsh
from stagewright.runtime.safety.memory import keep_prediction
from stagewright.runtime.settings import Settings
from stagewright.schedule import Schedule
from stagewright.scheduling import check_schedule

_States = Callable[[str], float]


def check_before_launch(
    schedule: Schedule, layered: Layered, settings: Settings, folder: Path, *, states: _States, keep: int | None,
    scratch: float = 0.0,
) -> None:  # fmt: skip
    """Refuses a run that cannot work, with everything that is wrong with it.

    `states` says how many numbers the optimizer keeps for each number of a parameter, by its role, `scratch` how many
    it takes while it updates; `keep` is how many checkpoints there will be.
    """
    plan, found = schedule.plan, list[str]()
    try:
        check_schedule(schedule)
    except StagewrightError as fault:
        found.append(fault.what)
    sizes = _stage_bytes(plan, layered, settings, states)
    here = {"this host": (_this_machine(), sorted({id.host for id in plan.devices}))}
    needed = needed_bytes(plan, layered, settings, states=states, scratch=scratch, device=device_of(settings))
    found += _too_little_memory(plan, needed, settings, here)
    found += _unwritable(folder)
    _refuse([*found, *(_too_little_disk(plan, sizes, folder, keep) if keep else ())])
    keep_prediction(folder, needed)


def _refuse(found: Sequence[str]) -> None:
    """Raises one error for all that was found, if anything was."""
    if len(found) == 1:
        raise UsageError(found[0])
    if found:
        lines = "\n".join(f"{number}. {line}" for number, line in enumerate(found, 1))
        raise UsageError(f"the run cannot start: {count(len(found), 'thing')} must be put right first", lines)


class _Bytes(NamedTuple):
    """What the parameters of a stage take, in the order of `Memory.parameter_bytes`."""

    weights: int
    trained: int
    """Those of them that are trained; so much their gradients take too."""
    states: int
    """What the optimizer and a correction keep for them."""


def _stage_bytes(plan: Plan, layered: Layered, settings: Settings, states: _States) -> list[_Bytes]:
    """What each stage's parameters take; those that several stages use are in each of them."""
    size, first, found = 8 if settings.precision == "fp64" else 4, 0, []
    named, roles = dict(layered.model.named_parameters()), parameter_roles(layered)
    for number, stage in enumerate(plan.stages):
        names = layered.parameter_names(first, first + len(stage.layers))
        trained = [name for name in names if named[name].requires_grad]
        copies = CORRECTIONS[settings.correction_of(number)].copies(stage.versions - 1)
        kept = sum(named[name].numel() * (states(roles[name]) + copies) for name in trained)
        weights, moving = (sum(named[name].numel() for name in each) for each in (names, trained))
        found.append(_Bytes(size * weights, size * moving, math.ceil(size * kept)))
        first += len(stage.layers)
    return found


def needed_bytes(
    plan: Plan, layered: Layered, settings: Settings, *, states: _States, scratch: float, device: Device
) -> list[StageBytes]:
    """What each worker holds at most; without activations where shapes do not suffice for a model."""
    memory = _memory_of(layered, settings, states, scratch)
    found = [StageBytes(*[0] * 9)] * len(plan.devices)
    if memory is not None:
        found = plan_bytes(memory, plan, [device] * len(plan.devices))
    for number, (members, size) in enumerate(zip(plan.workers, _stage_bytes(plan, layered, settings, states))):
        for worker in members:
            found[worker] = _with_tied(found[worker], plan, number, size, memory)
    # A worker builds the whole model where it does not read its own stage from a file, and on a CPU it keeps it.
    whole = sum(each.nbytes for each in layered.model.parameters() if not each.is_meta and settings.device == "cpu")
    return [each._replace(weights=max(each.weights, whole)) for each in found]


def _memory_of(layered: Layered, settings: Settings, states: _States, scratch: float) -> Memory | None:
    """The memory model of a model as layers; None where shapes do not suffice for it."""
    with torch.random.fork_rng(devices=()):
        try:
            memory = Memory(memory_profile(layered, settings.precision).with_states(states, scratch))
        except Exception:  # whatever a model does with values that are not there: it may well run
            return None
    memory.in_common = settings.device == "cpu"
    return memory


def _with_tied(found: StageBytes, plan: Plan, number: int, size: _Bytes, memory: Memory | None) -> StageBytes:
    """With what a stage has of parameters that the profile counts in another one, which uses them first."""
    first, last, stage = plan.edges[number], plan.edges[number + 1], plan.stages[number]
    known = (0, 0, 0) if memory is None else memory.parameter_bytes(first, last)
    weights, trained, states = (max(own - each, 0) for own, each in zip(size, known))
    return found._replace(
        weights=found.weights + weights, versions=found.versions + trained * (stage.versions - 1),
        gradients=found.gradients + trained, optimizer=found.optimizer + states,
    )  # fmt: skip


class _Machine(NamedTuple):
    """The bytes that a host's memory can give, and those of each of its cards."""

    memory_bytes: int
    card_bytes: tuple[int, ...]


_Machines = Mapping[str, tuple[_Machine, Sequence[int]]]
"""By name, each with the numbers of the plan's hosts that it is."""


def _this_machine() -> _Machine:
    """The one that this process runs on."""
    cards = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return _Machine(_available_memory(), tuple(torch.cuda.get_device_properties(card).total_memory for card in cards))


def device_of(settings: Settings) -> Device:
    """A device of a run's kind, for what a framework takes there: the first card here, or whatever a card is."""
    if settings.device == "cpu":
        return find_kind("cpu").device()
    called = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    return (kind_called(called) or find_kind("h100")).device()


def _too_little_memory(plan: Plan, needed: Sequence[StageBytes], settings: Settings, machines: _Machines) -> list[str]:
    """Hosts and cards whose memory cannot hold what their workers need.

    A worker has the card of its place among its host's workers; where there are more workers than cards, they share.
    """
    found = []

    def judge(who: str, members: Sequence[int], where: str, has: int) -> None:
        size = sum(needed[worker].total for worker in members)
        if size > has:
            parts = in_words(max((needed[worker] for worker in members), key=sum)._asdict())
            found.append(
                f"{who} {size / 2**30:.1f} GiB, {where} has {has / 2**30:.1f} GiB; the fullest worker holds {parts}: "
                "use more devices, fewer rows or versions, more microbatches, --recompute, or --shard-optimizer"
            )

    for name, (machine, hosts) in machines.items():
        here = [[worker for worker, id in enumerate(plan.devices) if id.host == host] for host in hosts]
        if settings.device == "cpu":
            everyone = [worker for members in here for worker in members]
            judge("the workers together need", everyone, name, machine.memory_bytes)
        for card, has in enumerate(machine.card_bytes if settings.device != "cpu" else ()):
            members = [worker for each in here for worker in each[card :: len(machine.card_bytes)]]
            where = format_devices([plan.devices[worker] for worker in members]) if members else ""
            judge(f"the stages on {where} need", members, f"card {card} of {name}", has)
    return found


def _available_memory() -> int:
    """The bytes of memory that this host can give."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 1 << 62


def _unwritable(folder: Path) -> list[str]:
    """Whether files can be made in the run's folder."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as fault:
        return [f"the run's folder {folder} cannot be written to: {fault.strerror}"]
    return []


def _too_little_disk(plan: Plan, sizes: Sequence[_Bytes], folder: Path, keep: int) -> list[str]:
    """Whether the checkpoints that are kept, and the one being written, have room: with every version and state."""
    each = sum(
        size.weights + size.trained * (stage.versions - 1) + size.states for stage, size in zip(plan.stages, sizes)
    )
    needed, free = (keep + 1) * each, shutil.disk_usage(folder).free
    if needed <= free:
        return []
    return [
        f"{keep} checkpoints and the one being written take {needed / 2**30:.2f} GiB, {folder} has "
        f"{free / 2**30:.2f} GiB left: use a smaller --keep, or another folder"
    ]


# Other hosts


def _facts(paths: Sequence[str], port: int | None) -> dict[str, Any]:
    """What hosts must agree on: versions, the clock, which files they see, and whether a port is free."""
    is_free = True
    try:
        if port is not None:
            socket.create_server(("", port)).close()
    except OSError:
        is_free = False
    return {
        "stagewright": version("stagewright"), "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:2])),
        "time": time.time(), "missing": [path for path in paths if not Path(path).exists()],
        "port_is_free": is_free, "machine": _this_machine(),
    }  # fmt: skip


def check_hosts(
    hosts: OverSsh, paths: Sequence[str], plan: Plan, layered: Layered, settings: Settings, *, states: _States,
    scratch: float = 0.0, port: int = PORT,
) -> None:  # fmt: skip
    """Asks every host for its facts, side by side, and refuses what does not fit together or is too small."""
    running = []
    for host in range(len(hosts.names)):
        words = ["-m", "stagewright.runtime.safety.preflight", str(port if host == 0 else 0), *paths]
        command = hosts.reach(host, [hosts.python, *words])
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    told = dict(zip(hosts.names, map(_answer, running)))
    known = {host: each for host, each in told.items() if isinstance(each, dict)}
    numbers = {name: [number] for number, name in enumerate(hosts.names)}
    machines = {host: (_Machine(*each["machine"]), numbers[host]) for host, each in known.items()}
    needed = needed_bytes(plan, layered, settings, states=states, scratch=scratch, device=device_of(settings))
    silent = [f"host {host} cannot be asked: {each}" for host, each in told.items() if isinstance(each, str)]
    _refuse([*silent, *_differences(known, port), *_too_little_memory(plan, needed, settings, machines)])


def _answer(process: subprocess.Popen[str]) -> dict[str, Any] | str:
    """A host's facts, with how far its clock is from ours, or why there are none."""
    try:
        out, err = process.communicate(timeout=60.0)
        told: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        told["clock_s"] = told.pop("time") - time.time()
        return told
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "it did not answer within 60 s"
    except (ValueError, IndexError, KeyError, AttributeError):
        return (err.strip().splitlines() or [f"it ended with status {process.returncode}"])[-1]


def _differences(known: Mapping[str, Mapping[str, Any]], port: int) -> Iterable[str]:
    """What is wrong with the hosts' facts, one line each."""
    for what in ("stagewright", "torch", "python"):
        found = {host: each[what] for host, each in known.items()}
        if len(set(found.values())) > 1:
            yield f"{what} is not the same everywhere: {_named(found)}"
    clocks = {host: each["clock_s"] for host, each in known.items()}
    if clocks and max(clocks.values()) - min(clocks.values()) > 5.0:  # asking takes a while too
        yield f"the clocks are apart: {_named({host: f'{value:+.0f} s' for host, value in clocks.items()})}"
    for host, each in known.items():
        yield from (f"host {host} has no {path}" for path in each["missing"])
        if not each["port_is_free"]:
            yield f"port {port} of host {host} is taken"


def _named(found: Mapping[str, object]) -> str:
    return ", ".join(f"{value} on {host}" for host, value in found.items())


if __name__ == "__main__":
    print(json.dumps(_facts(sys.argv[2:], int(sys.argv[1]) or None)))
