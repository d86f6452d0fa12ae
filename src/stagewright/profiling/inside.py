"""Layers and links measured inside the hosts of a cluster: one worker's part of it.

    torchrun … -m stagewright.profiling.inside FOLDER        FOLDER/inside.json says what to measure

Worker n leaves FOLDER/inside-n.json, and its profile beside it where it made one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from stagewright.models import Layered, build_model
from stagewright.profile import Profile
from stagewright.profiling.heap import keep_freed_memory
from stagewright.profiling.kernels import computing_with
from stagewright.profiling.links import all_at_once, bounce_pairs, core_s_per_byte
from stagewright.profiling.measured import make_profile, time_model
from stagewright.profiling.pulse import Pulse, Timed, evened_median

ALL_PAIRS = 4
"""Up to so many hosts every pair is measured; beyond, each host and the one after it."""
LARGE_S = 0.15
SMALLEST_BYTES, LARGEST_BYTES = 1 << 20, 16 << 20
"""A large message takes about so long at the rate that the cluster file names, within these bounds."""
NUM_LARGE = 3
"""So few are enough on links with a limit, and beyond four hosts every link is in two pairs."""
IN_ROUNDS_S, MOST_ROUNDS = 12.0, 12
"""How long the model in one piece is timed on CPUs, in rounds over all batch sizes; as often as layers at least."""
ALONE_S, FEWEST_ALONE = 4.0, 2
"""How long one host passes over the model while the others wait."""
WARM_UP = 1
"""Hosts with a part of a core take long for every repeat, and the first has taken the memory."""


def chosen_pairs(num_hosts: int) -> list[tuple[int, int]]:
    """The pairs of hosts between which links are measured."""
    if num_hosts <= ALL_PAIRS:
        return list(combinations(range(num_hosts), 2))
    near = ((host, (host + 1) % num_hosts) for host in range(num_hosts))
    return sorted((min(pair), max(pair)) for pair in near)


def large_bytes(bytes_per_s: float) -> int:
    """How large a message is that shows a rate."""
    return int(min(max(bytes_per_s * LARGE_S, SMALLEST_BYTES), LARGEST_BYTES))


def measure(folder: Path, asked: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """What this worker saw of the links and, where it is one of those that profile, of the layers."""
    found: dict[str, Any] = {"pairs": [], "core_s_per_byte": 0.0}
    if asked["links"]:
        num_bytes = large_bytes(asked["bytes_per_s"])
        found["pairs"] = bounce_pairs(rank, chosen_pairs(size), num_bytes, NUM_LARGE)
        found["core_s_per_byte"] = core_s_per_byte(rank, size, num_bytes)
        if asked["strands"]:
            strands = [dist.new_group(backend="gloo") for _ in range(asked["strands"])]
            found["all_at_once"] = all_at_once(rank, size, num_bytes, strands)
    dist.barrier()
    if not asked["batch_sizes"]:
        return found
    model = build_model(asked["model"], device=asked["device"], **asked["options"])
    if rank in asked["profiles"]:
        found |= profile_here(folder, asked, rank, model)
    elif rank in asked["busy"]:
        found["model_s"] = pass_until_others_are_done(folder, asked, model)
    dist.barrier()
    if asked["device"] == "cpu":
        if rank == asked["profiles"][0]:
            found["alone_s"] = pass_alone(asked, model, found["beat_s"])
        dist.barrier()
    return found


def profile_here(folder: Path, asked: Mapping[str, Any], rank: int, model: Layered) -> dict[str, Any]:
    """Profiles the model while other hosts are as busy, so that all see full cores.

    Returns the seconds of the largest pass; on CPUs also what a beat of the machine's pulse took on the whole while
    passes were timed, and how many beats each pass of the middle size took.
    """
    is_cpu = asked["device"] == "cpu"
    profile = make_profile(
        model, batch_sizes=asked["batch_sizes"], name=asked["model"], repeats=asked["repeats"], warm_up=WARM_UP,
        in_one_piece=not is_cpu,
    )  # fmt: skip
    told: dict[str, Any] = {}
    if is_cpu:
        passes = passes_in_rounds(model, profile, asked["repeats"])
        pulse = Pulse.load(Path(asked["pulse"]))
        usual_s = pulse.between(passes[0][0].start_s, passes[-1][-1].stop_s)
        evened = [pulse.evened(of_size, usual_s) for of_size in passes]
        profile = replace(profile, model_s=tuple(map(median, evened)))
        told = {"beat_s": usual_s, "in_beats": [each / usual_s for each in evened[middle_size(profile.batch_sizes)]]}
    profile.save(folder / f"inside-{rank}.profile.json")
    return told | {"model_s": profile.model_s[-1]}


def passes_in_rounds(model: Layered, profile: Profile, fewest: int) -> list[list[Timed]]:
    """By batch size its passes, in rounds over all sizes; of small ones several a round, for they scatter more."""
    longest_s = profile.model_s[-1]
    numbers = [max(round(longest_s / seconds / 2), 1) for seconds in profile.model_s]
    round_s = sum(number * seconds for number, seconds in zip(numbers, profile.model_s))
    found: list[list[Timed]] = [[] for _ in numbers]
    for _ in range(min(max(round(IN_ROUNDS_S / round_s), fewest), MOST_ROUNDS)):
        for of_size, rows, number in zip(found, profile.batch_sizes, numbers):
            of_size += [timed_pass(model, rows) for _ in range(number)]
    return found


def middle_size(batch_sizes: Sequence[int]) -> int:
    """Which of a profile's batch sizes passes are counted in beats at."""
    return len(batch_sizes) // 2


def timed_pass(model: Layered, rows: int) -> Timed:
    """A pass over the model, and when it was."""
    started = perf_counter()
    return Timed(time_model(model, rows), started, perf_counter())


def pass_alone(asked: Mapping[str, Any], model: Layered, beat_s: float) -> float:
    """Seconds of a pass of the middle size while no other host computes, at the pulse of those that were timed."""
    rows, until = asked["batch_sizes"][middle_size(asked["batch_sizes"])], perf_counter() + ALONE_S
    found = [timed_pass(model, rows)]
    while len(found) < FEWEST_ALONE or perf_counter() < until:
        found.append(timed_pass(model, rows))
    return median(Pulse.load(Path(asked["pulse"])).evened(found, beat_s))


def pass_until_others_are_done(folder: Path, asked: Mapping[str, Any], model: Layered) -> float:
    """Seconds of the largest pass on a host with another share: its speed is all that is asked of it.

    It would take as many times as long for a profile as it is slower. It is busy while others profile, for as busy it
    will be in a run.
    """
    rows = asked["batch_sizes"][-1]
    time_model(model, rows)  # the first time takes memory
    found = [timed_pass(model, rows)]
    while not all((folder / f"inside-{other}.profile.json").exists() for other in asked["profiles"]):
        found.append(timed_pass(model, rows))
    return evened_median(found, Pulse.load(Path(asked["pulse"])) if asked["pulse"] else None)


def middle(values: Sequence[float]) -> float:
    """The median of what is above zero; 0 where nothing is."""
    positive = [value for value in values if value > 0]
    return median(positive) if positive else 0.0


def main(folder: str) -> None:
    """Measures as one of the workers that torchrun started."""
    where, rank, size = Path(folder), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    asked = json.loads((where / "inside.json").read_text(encoding="utf-8"))
    torch.set_num_threads(asked["threads"])
    keep_freed_memory()  # as workers do
    dist.init_process_group("gloo")
    with computing_with(asked["kernels"]):
        found = measure(where, asked, rank, size)
    (where / f"inside-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
