"""What if: a model or a plan on any hardware and with any batch, where more stops helping, and a picture of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, NamedTuple

from stagewright.cluster import Cluster, Link, parse_placement
from stagewright.cost import Costs
from stagewright.errors import UsageError
from stagewright.plan import Plan
from stagewright.planning import PlanOptions, fixed_plan
from stagewright.profile import Precision, Profile
from stagewright.record import Record
from stagewright.schedule import Schedule
from stagewright.scheduling import make_schedule
from stagewright.simulation.run import IMAGENET_IMAGES, simulate
from stagewright.system import OWN, System


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What to simulate, whatever the cluster: a plan, or a model of which the options make one."""

    model: str
    plan: Plan | None = None
    profile: Profile | None = None
    """By default an analytic one of the cluster's first kind of device."""
    precision: Precision = "fp32"
    adapt: Callable[[Any], Any] | None = None
    """What puts adapters into the model."""
    prepare: Callable[[Profile], Profile] = lambda profile: profile
    """The profile as an optimizer has it; by default as SGD with momentum has."""
    data: str = "synthetic"
    epoch_images: int | None = IMAGENET_IMAGES
    system: System = OWN

    def record(self, cluster: Cluster, options: PlanOptions, *, detail: bool = True, name: str = "") -> Record:
        """The simulation on a cluster, under a plan as the options have it."""
        profile = self.profile
        if profile is None:
            # Only this needs torch, which takes seconds to import.
            from stagewright.profiling.analytic import profile_for

            profile = profile_for(cluster, self.model, self._sizes(cluster, options), self.precision, self.adapt)
        profile = self.prepare(profile)
        made = self.plan
        if made is None:
            made = fixed_plan(profile, options, cluster)
        else:
            made = replace(made, batch=options.batch or made.batch, hold=options.hold or made.hold)
        agree = "fp16" in (self.precision, profile.precision)
        schedule = fastest_schedule(made, profile, cluster, agree=agree, data=self.data, system=self.system)
        return simulate(
            schedule, profile, cluster, data=self.data, epoch_images=self.epoch_images, detail=detail, name=name,
            system=self.system,
        )  # fmt: skip

    def _sizes(self, cluster: Cluster, options: PlanOptions) -> tuple[int, ...]:
        """Numbers of rows to profile: a first-stage replica's, a quarter of them, and a whole microbatch."""
        if self.plan is not None:
            first, batch, count = self.plan.replicas[0], options.batch or self.plan.batch, self.plan.num_microbatches
        else:
            first = len(parse_placement(options.placement or "", cluster)[0])
            batch, count = options.rows(first), options.num_microbatches or 1
        whole = max(batch // count, 1)
        share = max(whole // first, 1)
        return tuple(sorted({max(share // 4, 2), max(share, 2), max(whole, 2)}))


class Point(NamedTuple):
    """One setting of a sweep and what came of it."""

    value: float
    label: str
    record: Record


def faster_links(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with every link's rate times `factor`."""

    def faster(links: Iterable[Link]) -> tuple[Link, ...]:
        return tuple(replace(link, bytes_per_s=link.bytes_per_s * factor) for link in links)

    hosts = tuple(replace(host, links=faster(host.links)) for host in cluster.hosts)
    return replace(cluster, hosts=hosts, links=faster(cluster.links))


def parse_factors(text: str) -> tuple[float, ...]:
    """The factors that `×2` or `x0.5,x1,x2` names."""
    factors = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*[x×]?(\d{1,6}(?:\.\d{1,6})?)\s*", part, re.ASCII)
        if match is None or float(match[1]) == 0:
            raise UsageError(f"--bandwidth {text!r}: expected factors such as x2, or x1,x2,x4")
        factors.append(float(match[1]))
    return tuple(factors)


def knee(points: Sequence[Point]) -> Point | None:
    """The point after which more no longer helps: from it on, a doubling gains less than 5 %."""
    ordered = sorted(points, key=lambda point: point.value)
    for here, there in zip(ordered, ordered[1:]):
        gain = there.record.samples_per_s / here.record.samples_per_s
        doublings = (there.value / here.value - 1) or 1.0
        if gain - 1 < 0.05 * min(doublings, 1.0):
            return here
    return None


def fastest_schedule(
    plan: Plan, profile: Profile, cluster: Cluster, *, agree: bool, data: str, system: System = OWN
) -> Schedule:
    """The plan's schedule; where versions leave the choice, with the `hold` that is predicted to be faster.

    With K = 2 a stage can either run forward of the next batch early (hold 2), which hides transfers, or late (hold 1),
    which lets its all-reduce overlap the whole next batch:

        hold 2   F1 B0 ─ reduce 0 ─ U0 F2 B1        hold 1   F1 B1 U0 F2 B2 U1
                                                                 ─ reduce 1 ──
    """
    made = make_schedule(plan, agree=agree)
    if plan.hold is not None or plan.is_synchronous:
        return made
    tight = make_schedule(plan, agree=agree, hold=1)
    costs = Costs(profile, cluster, system)
    how: dict[str, Any] = {"data": data, "detail": False, "costs": costs}
    steps = [simulate(each, profile, cluster, **how).median_step_s for each in (made, tight)]
    return tight if steps[1] < steps[0] * 0.999 else made


def plot_svg(points: Sequence[Point], width: int = 640, height: int = 360, margin: int = 56) -> str:
    """An SVG with a dot a point; the dashed line is what proportional growth from the first point would be."""
    ordered = sorted(points, key=lambda point: point.value)
    first, most_x = ordered[0], ordered[-1].value
    ideal = first.record.samples_per_s * most_x / first.value if first.value else 0.0
    most_y = max(*(point.record.samples_per_s for point in ordered), ideal)

    def place(x: float, y: float) -> tuple[float, float]:
        across = margin + x / most_x * (width - 2 * margin)
        return round(across, 1), round(height - margin - y / most_y * (height - 2 * margin), 1)

    def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'

    dots = [place(point.value, point.record.samples_per_s) for point in ordered]
    end = place(most_x, ideal)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M{dots[0][0]},{dots[0][1]} L{end[0]},{end[1]}" stroke="#999" stroke-dasharray="4 4"/>',
        f'<polyline points="{" ".join(f"{x},{y}" for x, y in dots)}" fill="none" stroke="#2563eb" stroke-width="2"/>',
    ]
    for point, (x, y) in zip(ordered, dots):
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="#2563eb"/>')
        parts += [text(x, y - 10, f"{point.record.samples_per_s:,.0f}"), text(x, height - margin + 18, point.label)]
    parts.append(text(margin, margin - 28, "samples/s; dashed: in proportion to the first point", "start") + "</svg>")
    return "\n".join(parts)
