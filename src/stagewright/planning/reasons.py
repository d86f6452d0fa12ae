"""Why a plan: a sentence for people."""

from __future__ import annotations

from stagewright.cluster import format_devices
from stagewright.cost import Costs
from stagewright.plan import Plan


def shape(plan: Plan) -> str:
    """`7-1 cut at fc1`, or `data parallel` where there is one stage."""
    if len(plan.stages) == 1:
        many = len(plan.stages[0].devices)
        return "data parallel" if many > 1 else "one device"
    cuts = ", ".join(stage.layers[0] for stage in plan.stages[1:])
    return f"{'-'.join(map(str, plan.replicas))} cut at {cuts}"


def bytes_text(num_bytes: float) -> str:
    """`494 MiB`, `6.9 GiB`."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 2**power:
            value = num_bytes / 2**power
            return f"{value:,.1f} {unit}" if value < 100 and unit == "GiB" else f"{value:,.0f} {unit}"
    return f"{num_bytes:,.0f} B"


def explain(plan: Plan, step_s: float, costs: Costs, rival: Plan | None, rival_s: float) -> str:
    """One sentence on what the plan gains over data parallelism, or why nothing is gained."""
    if rival is None:
        return f"{shape(plan)} fits; data parallelism does not."
    if len(plan.stages) == 1:
        return f"{shape(plan)} is fastest: no cut gains more than its transfers and waiting cost."
    alone, reduced, total = _reduced_bytes(plan, costs)
    gain = f"{rival_s / step_s:.2f} × as fast as data parallelism"
    if alone > total / 4:
        kept = max(
            (n for n, stage in enumerate(plan.stages) if len(stage.devices) == 1),
            key=lambda n: _weights(plan, costs, n),
        )
        where = format_devices(plan.stages[kept].devices)
        rest = f"only {bytes_text(reduced)} are reduced" if reduced else "nothing is reduced"
        return (
            f"{shape(plan)} keeps the {bytes_text(_weights(plan, costs, kept))} of weights from {_span(plan, kept)} on "
            f"{where} alone, so {rest} instead of {bytes_text(total)}: {gain}."
        )
    return f"{shape(plan)} reduces each stage's gradients among fewer devices, and hides its transfers: {gain}."


def _reduced_bytes(plan: Plan, costs: Costs) -> tuple[int, int, int]:
    """Weights on stages of one device, on stages of several, and all of them."""
    weights = [_weights(plan, costs, number) for number in range(len(plan.stages))]
    alone = sum(size for size, stage in zip(weights, plan.stages) if len(stage.devices) == 1)
    return alone, sum(weights) - alone, sum(weights)


def _weights(plan: Plan, costs: Costs, number: int) -> int:
    first = sum(len(stage.layers) for stage in plan.stages[:number])
    return costs.gradient_bytes(first, first + len(plan.stages[number].layers))


def _span(plan: Plan, number: int) -> str:
    layers = plan.stages[number].layers
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
