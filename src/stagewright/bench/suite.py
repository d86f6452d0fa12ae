"""Suites: files of cases, checked as a whole before anything runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, ValidationError

from stagewright.bench.expand import expand
from stagewright.cluster import Cluster, DeviceId, find_cluster, format_placement, parse_placement
from stagewright.errors import FileError, StagewrightError, UsageError
from stagewright.plan import Plan
from stagewright.planning.counted import find_model
from stagewright.planning.fixed import fixed_plan
from stagewright.planning.options import PlanOptions
from stagewright.profile import Precision
from stagewright.schema import Saved, adapter, check_head, describe, read_plain, schema, twin
from stagewright.training.sections import read_section, section_keys

Mode = Literal["train", "rehearse", "simulate"]
_Value = str | int | float | bool | tuple[str | int | float, ...]
RECORDS = "records"
_REPETITIONS = 7


@schema(error=UsageError)
class Case:
    """One benchmark setting."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=120)]
    """Also the name of its files."""
    model: str
    run: Mode = "train"
    plan: PlanOptions = Field(default_factory=PlanOptions)
    hosts: int | None = Field(default=None, ge=1, le=1024)
    """By default as many as the placement names."""
    devices: int | None = Field(default=None, ge=1, le=1024)
    """Devices of each host, for data parallelism; instead of a placement."""
    device: Literal["cpu", "cuda"] | None = None
    share: int = Field(default=1, ge=1)
    """Workers that share one card."""
    precision: Precision = "fp32"
    data: str = "synthetic"
    """`synthetic`, `records` (a folder that is named when the suite runs), or a folder."""
    steps: int = Field(default=20, ge=3)
    warm_up: int = Field(default=5, ge=0)
    """First steps that are not measured."""
    epoch_images: int | None = Field(default=None, ge=1)
    limit_s: float = Field(default=3600.0, gt=0)
    """The longest that one run may take."""
    options: Mapping[str, _Value] = Field(default_factory=dict)
    """Further options of `train` and `rehearse`, such as channels_last: true."""

    def __post_init__(self) -> None:
        if self.devices is not None and self.plan.placement:
            raise UsageError(f"case {self.name}: devices and placement are both given", "leave one of them out")
        if self.warm_up > self.steps - 2:
            raise UsageError(f"case {self.name}: warm_up is {self.warm_up} of {self.steps} steps: leave 2 to measure")

    @property
    def placement(self) -> str:
        """The placement as commands take it; empty where the case leaves it to them."""
        if self.devices is None:
            return self.plan.placement or ""
        ids = [DeviceId(host, device) for host in range(self.hosts or 1) for device in range(self.devices)]
        return format_placement([ids])

    @property
    def num_hosts(self) -> int:
        """How many hosts the case needs."""
        named = parse_placement(self.placement) if self.placement else ()
        return max((id.host for stage in named for id in stage), default=(self.hosts or 1) - 1) + 1

    def make_plan(self, cluster: Cluster | None = None) -> Plan:
        """The plan of the case; without a cluster only its own sense is checked."""
        return fixed_plan(find_model(self.model).table, replace(self.plan, placement=self.placement), cluster)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Cases of a file, in its order."""

    name: str
    about: str
    cluster: str | None
    """Where cases are simulated whose hardware is not here."""
    repetitions: int
    cases: tuple[Case, ...]


@schema(error=UsageError)
class _SuiteFile(Saved):
    """A suite as it is written: matrices and inheritance not yet written out."""

    FORMAT: ClassVar[str] = "stagewright.suite"
    ERROR: ClassVar[type[StagewrightError]] = UsageError

    name: str
    about: str = ""
    cluster: str | None = None
    repetitions: int = Field(default=_REPETITIONS, ge=1)
    defaults: Mapping[str, Any] = Field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict)
    cases: tuple[Mapping[str, Any], ...] = Field(min_length=1)


def ready_made_suites() -> dict[str, Path]:
    """The suite files that come with the package, by name."""
    package = Path(__file__).parents[1]
    folders = (package / "suites", package.parents[1] / "suites")
    found = (path for folder in folders for path in sorted(folder.glob("*.yaml")))
    # Suites of other formats, which other programs run, may lie beside them.
    return {path.stem: path for path in found if f"format: {_SuiteFile.FORMAT}\n" in path.read_text(encoding="utf-8")}


def load_suite(name_or_file: str) -> Suite:
    """The suite in a file, or the ready-made one of that name; everything in it that can be wrong is checked."""
    known = ready_made_suites()
    if name_or_file not in known and Path(name_or_file).suffix not in (".yaml", ".yml", ".json"):
        raise UsageError(
            f"no suite is named {name_or_file!r}; ready-made: {', '.join(known) or 'none'}",
            "give one of these names, or a .yaml or .json file",
        )
    path = known.get(name_or_file, Path(name_or_file))
    return make_suite(read_plain(path), where=name_or_file)


def make_suite(plain: object, *, where: str = "the suite") -> Suite:
    """The suite that plain values describe."""
    check_head(plain, _SuiteFile.FORMAT, _SuiteFile.VERSION, where)
    file = _SuiteFile.from_dict(plain, where=where)
    try:
        cases = tuple(_make_case(keys) for keys in expand(file.defaults, file.settings, file.cases))
        _check_cases(cases)
        if file.cluster is not None:
            find_cluster(file.cluster)
    except FileError as fault:
        raise fault
    except StagewrightError as fault:
        raise type(fault)(f"{where}: {fault.what}", fault.todo) from None
    return Suite(name=file.name, about=file.about, cluster=file.cluster, repetitions=file.repetitions, cases=cases)


def _make_case(keys: Mapping[str, Any]) -> Case:
    """The case with these keys, each of the right kind."""
    known = {each.key for each in section_keys(PlanOptions)}
    name = keys["name"]
    plan = read_section(
        PlanOptions, {key: value for key, value in keys.items() if key in known}, where=f"case {name}: key "
    )
    try:
        text = json.dumps({key: value for key, value in keys.items() if key not in known})
        made: Case = adapter(Case).validate_json(text)
        return replace(made, plan=plan)
    except ValidationError as fault:
        raise UsageError(f"case {name}: {describe(fault)}") from None
    except (TypeError, ValueError) as fault:
        raise UsageError(f"case {name}: cannot be read: {fault}") from None
    except StagewrightError as fault:
        raise UsageError(f"case {name}: {fault.what}", fault.todo) from None


def _check_cases(cases: Sequence[Case]) -> None:
    """Refuses a name that two cases have, and a case of which no plan can be made."""
    # On a file system that does not tell A from a, two such names would be one file.
    names = [case.name.lower() for case in cases]
    if len(set(names)) < len(names):
        raise UsageError(f"two cases are named {twin(names)!r}", "put what differs into the name, such as {batch}")
    for case in cases:
        try:
            # An empty placement is every device of a cluster that is not known yet: one will do to look at the rest.
            case.make_plan(None if case.placement else find_cluster("local-cpu"))
        except StagewrightError as fault:
            raise type(fault)(f"case {case.name}: {fault.what}", fault.todo) from None
        if case.hosts not in (None, case.num_hosts):
            raise UsageError(
                f"case {case.name}: hosts is {case.hosts}, but the placement {case.placement} needs {case.num_hosts}",
                "leave hosts out, or give devices instead of a placement",
            )
