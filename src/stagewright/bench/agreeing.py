"""What the workers of a contest wait for and agree on."""

from __future__ import annotations

import torch
import torch.distributed as dist

from stagewright.profiling.pulse import Timed
from stagewright.runtime.world import World


def wait(world: World) -> None:
    """Waits for all workers and their devices."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    if world.control is not None:
        dist.barrier(group=world.control)


def told_by_first(names: list[str], world: World) -> list[str]:
    """What worker 0 names."""
    told = [names]
    if world.control is not None:
        dist.broadcast_object_list(told, 0, group=world.control)
    return told[0]


def told_by_all(seconds: float, world: World) -> list[float]:
    """What every worker has measured."""
    told = [seconds] * world.size
    if world.control is not None:
        dist.all_gather_object(told, seconds, group=world.control)
    return told


def agreed_turn(turn: Timed, world: World) -> Timed:
    """A turn with the seconds that worker 0 has measured."""
    return turn._replace(seconds=agreed(turn.seconds, world))


def agreed(seconds: float, world: World) -> float:
    """What worker 0 has measured."""
    told = torch.tensor([seconds])
    if world.control is not None:
        dist.broadcast(told, 0, group=world.control)
    return float(told)
