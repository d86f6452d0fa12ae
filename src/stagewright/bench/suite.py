"""Suites: files of cases, checked as a whole before anything runs.

    settings:
      vgg16: {model: vgg16, batch_per_device: 32}
      split: {placement: 0:0-6.0:7, staleness: ssp}
    cases:
    - name: '{model}-{ratio}-{schedule}'
      like: [vgg16, split]
      matrix:
        ratio: [3:1, 10:1]
        schedule: [1f1b, dynamic]
      without: [{ratio: 10:1, schedule: dynamic}]

gives vgg16-3-1-1f1b, vgg16-3-1-dynamic and vgg16-10-1-1f1b. What a case says itself wins over what it is `like`, a
later setting wins over an earlier one, and all win over `defaults`. A value of a matrix may be a mapping of keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, ValidationError

from stagewright.cluster import Cluster, DeviceId, find_cluster, format_placement, parse_placement
from stagewright.errors import FileError, StagewrightError, UsageError
from stagewright.plan import Plan
from stagewright.planning.counted import find_model
from stagewright.planning.fixed import fixed_plan
from stagewright.planning.options import PlanOptions
from stagewright.profile import Precision
from stagewright.schema import Saved, adapter, check_head, describe, read_plain, schema, shown, twin
from stagewright.training.sections import read_section, section_keys

Mode = Literal["train", "rehearse", "simulate"]
_Keys = Mapping[str, Any]
_Value = str | int | float | bool | tuple[str | int | float, ...]
RECORDS = "records"


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
    seeds: bool = False
    """Whether each repetition has a seed of its own, its number."""
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
class SuiteFile(Saved):
    """A suite as it is written: matrices and inheritance not yet written out."""

    FORMAT: ClassVar[str] = "stagewright.suite"
    ERROR: ClassVar[type[StagewrightError]] = UsageError

    name: str
    about: str = ""
    cluster: str | None = None
    repetitions: int = Field(default=7, ge=1)
    defaults: Mapping[str, Any] = Field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict)
    cases: tuple[Mapping[str, Any], ...] = Field(min_length=1)


def load_suite(name_or_file: str) -> Suite:
    """The suite in a file, or the ready-made one of that name; everything in it that can be wrong is checked."""
    return make_suite(read_plain(SuiteFile.locate(name_or_file)), where=name_or_file)


def make_suite(plain: object, *, where: str = "the suite") -> Suite:
    """The suite that plain values describe."""
    check_head(plain, SuiteFile.FORMAT, SuiteFile.VERSION, where)
    file = SuiteFile.from_dict(plain, where=where)
    try:
        cases = tuple(_make_case(keys) for keys in _expand(file.defaults, file.settings, file.cases))
        _check_cases(cases)
        if file.cluster is not None:
            find_cluster(file.cluster)
    except FileError as fault:
        raise fault
    except StagewrightError as fault:
        raise type(fault)(f"{where}: {fault.what}", fault.todo) from None
    return Suite(name=file.name, about=file.about, cluster=file.cluster, repetitions=file.repetitions, cases=cases)


def _make_case(keys: Mapping[str, Any]) -> Case:
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


# ── matrices and inheritance ────────────────────────────────────────────────────────────────────────────


def _expand(defaults: _Keys, settings: Mapping[str, _Keys], cases: Sequence[_Keys]) -> Iterator[dict[str, Any]]:
    for number, case in enumerate(cases):
        if not isinstance(case.get("name"), str) or not case["name"]:
            raise UsageError(f"case number {number + 1} has no name", "give it one: name: vgg16-dp")
        for chosen in _combinations(case):
            yield _inherit(defaults, settings, case, chosen)


def _combinations(case: _Keys) -> Iterator[dict[str, Any]]:
    """One value of every axis of a case's matrix, in the order in which they are written; but those left out."""
    matrix, without, where = case.get("matrix", {}), case.get("without", []), f"case {case['name']!r}: key"
    if not isinstance(matrix, Mapping):
        raise UsageError(f"{where} matrix is {shown(matrix)}: expected lists of values by key")
    for key, values in matrix.items():
        if not isinstance(values, list) or not values:
            raise UsageError(f"{where} matrix.{key} is {shown(values)}: expected a list of values")
        if key in case and key != "like":
            raise UsageError(f"{where} {key} is given and is in the matrix", "leave one of them out")
    excluded = without if isinstance(without, list) else [without]
    for some in excluded:
        if not isinstance(some, Mapping) or not some or not some.keys() <= matrix.keys():
            raise UsageError(f"{where} without holds {shown(some)}: expected values of keys of the matrix")
    for values in product(*matrix.values()):
        chosen = dict(zip(matrix, values))
        if not any(some.items() <= chosen.items() for some in excluded):
            yield chosen


def _inherit(defaults: _Keys, settings: Mapping[str, _Keys], case: _Keys, chosen: _Keys) -> dict[str, Any]:
    """The keys of one case of a matrix, and its name."""
    own = {key: value for key, value in case.items() if key not in ("like", "matrix", "without", "name")}
    direct = {key: value for key, value in chosen.items() if not isinstance(value, Mapping) and key != "like"}
    bundles = [dict(value) for value in chosen.values() if isinstance(value, Mapping)]
    likes = [*_names_of(case.get("like"), case["name"]), *_names_of(chosen.get("like"), case["name"])]
    made = dict(defaults)
    for keys in (*(_inherited(name, settings, ()) for name in likes), own, *bundles, direct):
        made.update({key: value for key, value in keys.items() if key != "name"})
    made["name"] = _name_of(case["name"], made, chosen)
    return made


def _names_of(like: object, case: str) -> list[str]:
    names = like if isinstance(like, list) else [] if like is None else [like]
    if not all(isinstance(name, str) for name in names):
        raise UsageError(f"case {case!r}: key like is {shown(like)}: expected names of settings")
    return list(names)


def _inherited(name: str, settings: Mapping[str, _Keys], below: tuple[str, ...]) -> dict[str, Any]:
    """The keys of a setting and of those it is itself like."""
    if name not in settings:
        known = ", ".join(settings) or "none"
        raise UsageError(f"no setting is named {name!r}; there are {known}", "add it under `settings`")
    if name in below:
        raise UsageError(f"setting {name!r} is like itself, by way of {' → '.join((*below, name))}")
    own = settings[name]
    made: dict[str, Any] = {}
    for base in _names_of(own.get("like"), name):
        made.update(_inherited(base, settings, (*below, name)))
    made.update({key: value for key, value in own.items() if key != "like"})
    return made


def _name_of(template: str, keys: _Keys, chosen: _Keys) -> str:
    """The case's name: `{ratio}` stands for a value; a matrix whose values are not in the name is appended to it."""
    values = {**keys, **chosen}
    names = re.findall(r"\{(\w+)\}", template)
    for name in names:
        if name not in values:
            raise UsageError(f"case {template!r}: its name has {{{name}}}, which is no key of it")
    made = re.sub(r"\{(\w+)\}", lambda found: _label(values[found[1]]), template)
    return "-".join([made, *(_label(value) for key, value in chosen.items() if not names)])


def _label(value: object) -> str:
    """A value as a part of a file's name: `3:1` is 3-1; a mapping goes by its `name`."""
    if isinstance(value, Mapping):
        value = value.get("name", "-".join(map(_label, value.values())))
    if isinstance(value, list):
        value = "-".join(map(_label, value))
    return re.sub(r"[^A-Za-z0-9._+]+", "-", str(value)).strip("-")
