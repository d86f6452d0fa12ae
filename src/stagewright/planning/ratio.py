"""Where a ratio cuts the layers: `11:7` of time, FLOPs, parameters or layers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from stagewright.cost import layer_seconds
from stagewright.errors import PlanError, UsageError
from stagewright.planning.options import PlanOptions, RatioOf
from stagewright.profile import Profile


@dataclass(frozen=True, kw_only=True)
class LayerTable:
    """What cutting needs to know of each layer; a profile gives it, and a model alone gives it without seconds."""

    model: str
    names: tuple[str, ...]
    flops: tuple[float, ...]
    parameter_bytes: tuple[int, ...]
    seconds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        columns = (self.flops, self.parameter_bytes, self.names if self.seconds is None else self.seconds)
        if not self.names or {len(column) for column in columns} != {len(self.names)}:
            raise PlanError(f"{self.model}: the table of layers has columns of unequal length, or no layer")

    def costs(self, of: RatioOf) -> tuple[float, ...]:
        """One cost a layer; time without a profile is taken to go with FLOPs."""
        if of == "layers":
            return (1.0,) * len(self.names)
        if of == "params":
            return tuple(float(value) for value in self.parameter_bytes)
        return self.flops if of == "flops" or self.seconds is None else self.seconds


def table_of(profile: Profile, rows: int | None = None) -> LayerTable:
    """The table of a profile, its seconds being forward and backward on so many rows (its largest batch)."""
    rows = rows or profile.batch_sizes[-1]
    return LayerTable(
        model=profile.model,
        names=profile.names,
        flops=tuple(layer.flops for layer in profile.layers),
        parameter_bytes=tuple(layer.parameter_bytes for layer in profile.layers),
        seconds=layer_seconds(profile, rows),
    )


def cut_by_ratio(costs: Sequence[float], shares: Sequence[float]) -> tuple[int, ...]:
    """The layers that begin the second, third … stage, so that the stages' costs come closest to the shares.

    Cut k lies where the cost before it is nearest to its share of the whole, and every stage keeps a layer:

        costs 4 4 2 2 │ 2 4        shares 2 : 1  →  12 : 6, cut at layer 4
    """
    stages, layers = len(shares), len(costs)
    if stages > layers:
        raise PlanError(f"{layers} layers cannot be cut into {stages} stages", "use fewer stages")
    if sum(costs) <= 0:
        raise PlanError("a ratio of costs that are all zero means nothing", "use --ratio-of layers, or --cut NAME")
    passed = [0.0, *accumulate(costs)]
    wanted = [passed[-1] * part / sum(shares) for part in accumulate(shares[:-1])]
    cuts: list[int] = []
    for number, target in enumerate(wanted, start=1):
        first = (cuts[-1] if cuts else 0) + 1
        cuts.append(_nearest(passed, target, first, layers - (stages - number)))
    return tuple(cuts)


def _nearest(passed: Sequence[float], target: float, first: int, last: int) -> int:
    upper = min(max(bisect_left(passed, target), first), last)
    lower = max(upper - 1, first)
    return lower if target - passed[lower] <= passed[upper] - target else upper


def cut_by_names(names: Sequence[str], starts: Sequence[str]) -> tuple[int, ...]:
    """The layers that begin the second, third … stage, given by name."""
    for name in starts:
        if name not in names:
            close = ", ".join(other for other in names if other.startswith(name[:2])) or ", ".join(names[:12])
            raise UsageError(f"--cut {name}: the model has no such layer", f"layers: {close}")
        if name == names[0]:
            raise UsageError(f"--cut {name}: the first layer begins the first stage anyway", "name a later layer")
    cuts = tuple(names.index(name) for name in starts)
    if list(cuts) != sorted(set(cuts)):
        raise UsageError(f"--cut {','.join(starts)}: expected layers in the model's order, each once")
    return cuts


def given_cuts(
    table: LayerTable, options: PlanOptions, num_groups: int | None, shares: Sequence[float] = ()
) -> tuple[int, ...]:
    """Where the options say that stages begin; where they do not, in proportion to `shares`."""
    wanted = options.shares or shares
    num_stages = len(options.cut) + 1 if options.cut else len(wanted)
    if num_groups is not None and num_stages != num_groups:
        told = f"--cut {','.join(options.cut)}" if options.cut else f"--ratio {options.ratio}"
        raise UsageError(
            f"{told} makes {num_stages} stages, but the placement has {num_groups}",
            "give as many stages to both, such as --placement 0:0-6.0:7 --ratio 11:7, or --cut fc1",
        )
    if options.cut:
        return cut_by_names(table.names, options.cut)
    return cut_by_ratio(table.costs(options.ratio_of), wanted) if num_stages > 1 else ()
