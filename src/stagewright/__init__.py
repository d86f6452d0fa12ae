"""Trains PyTorch models over stages of uneven device groups.

model ─▶ profile ─▶ plan ─▶ schedule ─┬─▶ simulate ─┐
           ▲          ▲               ├─▶ rehearse ─┼─▶ record ─▶ report
        cluster ──────┘               └─▶ train    ─┘

    import stagewright as sw

    profile = sw.make_profile(sw.build_model("tiny-cnn"), batch_sizes=[8, 32])
    cluster = sw.make_cluster(4)
    plan = sw.make_plan(profile, cluster, sw.PlanOptions(batch=96)).best.plan
    record = sw.simulate(sw.make_schedule(plan), profile, cluster)

Names are loaded when they are first used, so that this module imports in a blink and only what needs torch loads it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagewright.cluster import Cluster, Device, DeviceId, Host, Link, find_cluster, make_cluster, parse_devices
    from stagewright.errors import (
        CheckpointError,
        ClusterError,
        DataError,
        FileError,
        ModelError,
        PlacementError,
        PlanError,
        ProfileError,
        RecordError,
        RunError,
        ScheduleError,
        SimulationError,
        StagewrightError,
        UsageError,
    )
    from stagewright.models import MODELS, Layered, build_model, cross_entropy_sum, make_layered, mean_loss
    from stagewright.plan import Plan, Stage
    from stagewright.planning.fixed import fixed_plan
    from stagewright.planning.options import PlanOptions
    from stagewright.profile import LayerProfile, Profile
    from stagewright.profiling.measured import make_profile
    from stagewright.record import Point, Record, Span
    from stagewright.report import make_report
    from stagewright.runtime.launch.environment import is_main
    from stagewright.runtime.settings import Settings
    from stagewright.schedule import Action, Kind, Schedule
    from stagewright.scheduling import make_schedule
    from stagewright.simulation import make_plan, simulate
    from stagewright.training.callbacks import Callback, EarlyStopping, Moment
    from stagewright.training.config import Job
    from stagewright.training.recipes import Recipe
    from stagewright.training.run import Run, workers
    from stagewright.training.start import train

__all__ = [
    "MODELS", "Action", "Callback", "CheckpointError", "Cluster", "ClusterError", "DataError", "Device", "DeviceId",
    "EarlyStopping", "FileError", "Host", "Job", "Kind", "LayerProfile", "Layered", "Link", "ModelError", "Moment",
    "PlacementError", "Plan", "PlanError", "PlanOptions", "Point", "Profile", "ProfileError", "Recipe", "Record",
    "RecordError", "Run", "RunError", "Schedule", "ScheduleError", "Settings", "SimulationError", "Span", "Stage",
    "StagewrightError", "UsageError", "build_model", "cross_entropy_sum", "find_cluster", "fixed_plan", "is_main",
    "make_cluster", "make_layered", "make_plan", "make_profile", "make_report", "make_schedule", "mean_loss",
    "parse_devices", "simulate", "train", "workers",
]  # fmt: skip


@cache
def _homes() -> dict[str, str]:
    """For each name above the module where it lives, as the imports for the type checker say."""
    import ast

    nodes = ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    found = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).startswith("stagewright.")]
    return {alias.name: str(node.module) for node in found for alias in node.names}


def __getattr__(name: str) -> object:
    """The noun or verb of this name, from the module where it lives; `__version__` from the installed package."""
    if name == "__version__":
        from importlib.metadata import version

        return version("stagewright")
    if name not in __all__:
        raise AttributeError(f"module 'stagewright' has no attribute {name!r}")
    value: object = getattr(import_module(_homes()[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """What the module offers, loaded or not."""
    return sorted({*globals(), *__all__, "__version__"})
