"""Which number formats go into the first stage and cross the cuts, settled once before the first step.

Under autocast a stage's outputs have the formats that its operators choose. The first replica of each stage runs two
rows of zeros through it and tells the others. Inputs that only products read are rounded to autocast's format before
they come: the products would do the same, and half as many bytes move until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stagewright.models import Layered, TensorSpec
from stagewright.models.tracing import undisturbed
from stagewright.plan import Plan
from stagewright.runtime.precision import AUTOCAST, autocast
from stagewright.runtime.replica import Replica
from stagewright.runtime.settings import Settings
from stagewright.runtime.world import World, gather_json


def fed_inputs(layered: Layered, settings: Settings) -> tuple[TensorSpec, ...]:
    """The model's inputs in the formats in which the first stage gets them."""
    rounded = AUTOCAST.get(settings.precision)
    return tuple(
        replace(spec, dtype=rounded) if rounded and only_multiplied and spec.dtype == torch.float32 else spec
        for spec, only_multiplied in zip(layered.inputs, layered.only_multiplied)
    )


def infer_dtypes(replicas: dict[int, Replica], plan: Plan, layered: Layered, world: World, settings: Settings) -> None:
    """Sets the formats of all stages' inputs and outputs on this worker; all workers must call it."""
    if settings.precision not in AUTOCAST:
        return
    if 0 in replicas:
        replicas[0].runner.inputs = fed_inputs(layered, settings)
    for stage in range(len(plan.stages) - 1):
        here, after = replicas.get(stage), replicas.get(stage + 1)
        first = plan.workers[stage][0]
        made = _try_out(here, world.device, settings) if here is not None and world.worker == first else ()
        names = [str(tensor.dtype).removeprefix("torch.") for tensor in made]
        formats = [getattr(torch, name) for name in gather_json(names, world.control, world.size)[first]]
        if here is not None:
            here.runner.outputs = _with_formats(here.runner.outputs, formats)
        if after is not None:
            after.runner.inputs = _with_formats(after.runner.inputs, formats)


def _try_out(here: Replica, device: torch.device, settings: Settings) -> Sequence[Tensor]:
    """The outputs of a stage for two rows of zeros, leaving no trace."""
    module = here.weights.modules[0]
    inputs = [torch.zeros((2, *spec.shape_per_row), dtype=spec.dtype, device=device) for spec in here.runner.inputs]
    with undisturbed(module), torch.no_grad(), autocast(settings):
        made: Sequence[Tensor] = module(*inputs)
    return made


def _with_formats(specs: Sequence[TensorSpec], formats: Sequence[torch.dtype]) -> tuple[TensorSpec, ...]:
    """The specs with these formats, one each."""
    return tuple(replace(spec, dtype=dtype) for spec, dtype in zip(specs, formats, strict=True))
