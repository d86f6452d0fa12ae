"""Transfers between workers: rows of activations forward, rows of gradients back.

A channel is one boundary between stages in one direction. Transfers between two workers on one channel happen in
the order in which both issue them, so nothing but the rows themselves travels: shapes and types are known.

    workers on        transport
    CPUs              gloo.py      messages over sockets
    cards             nccl.py      grouped messages, card to card
    a shared card     staged.py    over sockets, staged in pinned memory
"""

from __future__ import annotations

import os

from stagewright.plan import Plan
from stagewright.policy import RULES
from stagewright.runtime.launch.mps import SHARED
from stagewright.runtime.settings import Settings
from stagewright.runtime.transport.channel import Channel, Receipt, Transport
from stagewright.runtime.transport.gloo import GlooTransport
from stagewright.runtime.transport.nccl import NcclTransport
from stagewright.runtime.transport.staged import StagedTransport
from stagewright.runtime.world import World


def make_transport(world: World, plan: Plan, settings: Settings) -> Transport:
    """The transport for these workers' devices, unless the settings name one."""
    if world.device.type != "cuda":
        return GlooTransport(world, plan, threads_wait=RULES[plan.policy].by_arrival)
    return StagedTransport(world, plan) if is_staged(world, settings) else NcclTransport(world, plan)


def is_staged(world: World, settings: Settings) -> bool:
    """Whether what workers on cards exchange goes through pinned memory: where they share cards, unless told."""
    if world.device.type != "cuda" or settings.transport != "auto":
        return settings.transport == "staged" and world.device.type == "cuda"
    return SHARED in os.environ


__all__ = ["Channel", "Receipt", "Transport", "is_staged", "make_transport"]
