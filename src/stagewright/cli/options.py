"""Options made from the fields of frozen dataclasses: the parameters of a verb say which of them it takes.

field         num_microbatches: int | None = None, and the sentence below it
option        --microbatches INTEGER    that sentence, the choices, the default; in the panel of its section
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, is_dataclass, replace
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from stagewright.cluster import Cluster
from stagewright.errors import UsageError
from stagewright.plan import Plan
from stagewright.profile import Profile
from stagewright.profiling.detect import cluster_or_here
from stagewright.profiling.kinds import with_kinds_of
from stagewright.schema import schema
from stagewright.system import OWN, System
from stagewright.training.recipes import OPTIMIZERS, Adapters, OptimizerName
from stagewright.training.sections import Key, read_section, section_keys

Given = dict[str, dict[str, Any]]
"""By section and key what was typed; what was not is not there."""
_PANELS = {
    "data": "Data", "plan": "Plan", "recipe": "Recipe", "settings": "Computing", "job": "Job", "where": "Where",
    "rehearsal": "Rehearsal", "model": "Model",
}  # fmt: skip


@schema(error=UsageError)
class Hardware(Adapters):
    """On what a plan is made or simulated, and from whose figures: the options that `plan` and `simulate` share."""

    cluster: str | None = None
    """a cluster's name or file; this machine if left out"""
    assume_kind: str | None = None
    """take the profile for one of this kind of device, such as titan-v"""
    system: str = OWN.name
    """how what trains overlaps computing, sending and reducing: a system's name or file"""
    blocking_sends: bool = False
    """whatever the system, a worker waits until what it sends has arrived"""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """what is computed in, where a model's name is given"""
    optimizer: OptimizerName = "sgd"
    """whose states and steps count"""

    def with_optimizer(self, profile: Profile, name: str | None = None) -> Profile:
        """The profile with the states, the scratch and the step of the optimizer, or of the one of this name."""
        kind = OPTIMIZERS[name or self.optimizer]
        return profile.with_states(kind.states_of, kind.scratch_on(profile.device))

    @property
    def adapters(self) -> Callable[[Any], Any] | None:
        """What puts adapters into a model, where they are asked for."""
        if self.lora is None:
            return None
        from stagewright.training.export import lora_of  # needs torch

        return lora_of(self)

    def load_cluster(self) -> Cluster:
        """The cluster that is named, or this machine."""
        return cluster_or_here(self.cluster)

    def load_system(self) -> System:
        """The system, its sends as they are said to be."""
        found = System.find(self.system)
        return replace(found, blocking_sends=True) if self.blocking_sends else found

    def load_profile(self, file: str | Path | None, cluster: Cluster) -> Profile | None:
        """The profile in a file, or those of several kinds in a folder; None without one.

        It is taken for one of another kind of device where that is said; the cluster's other kinds are worked out.
        """
        if file is None and self.assume_kind is not None:
            told = f"--assume-kind {self.assume_kind} goes with a profile file, not with a model's name alone"
            raise UsageError(told, "leave it out, or give the profile")
        if file is not None and self.lora is not None:
            told = f"--lora {self.lora} goes with a model's name: {file} is of a model without adapters"
            raise UsageError(told, "give the model's name, without a profile")
        profile = None if file is None else Profile.load(file)
        if profile is None:
            return None
        return with_kinds_of(profile if self.assume_kind is None else profile.assumed(self.assume_kind), cluster)

    def assumed(self, profile: Profile, plan: Plan) -> list[str]:
        """What a prediction rests on beside measurements: said with every plan."""
        notes = [profile.notes[-1]] if self.assume_kind is not None else []
        notes += [each.notes[-1] for each in profile.others if each.source != profile.source and each.notes]
        rows = max(each.stop - each.start for stage in range(len(plan.stages)) for each in plan.shares(stage, 0))
        known = min(each.batch_sizes[-1] for each in (profile, *profile.others))
        far = f"the largest microbatch has {rows} {profile.sample_name}, {rows / known:.1f} times the {known} profiled"
        return [*notes, *([f"{far}: its times are extrapolated"] if rows > known else [])]


def names_file(what: str) -> bool:
    """Whether an argument names a file, or a folder of them, and not a model."""
    return Path(what).suffix in (".json", ".yaml", ".yml") or Path(what).is_dir()


def takes(
    *,
    sections: Mapping[str, type] | None = None,
    without: Collection[str] = (),
    also: Mapping[str, str] | None = None,
    usual: Mapping[str, Sequence[str]] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a verb the options of its parameters that are dataclasses, made from what was typed.

    The options of `sections` go to its parameter `given` as they were typed. Keys in `without` have no option, those in
    `also` have another name too, and where two sections have one key it is that of the later.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(verb, include_extras=True)
        made: dict[str, Any] = {name: cls for name, cls in hints.items() if is_dataclass(cls)}
        asked = {**(sections or {}), **made}
        homes = {
            name: (section, key)
            for section, cls in asked.items()
            for key in section_keys(cls)
            if key.key not in without and f"{section}.{key.key}" not in without
            for name in (key.choices if key.is_many and key.choices else (key.name if iskeyword(key.key) else key.key,))
        }
        own = [each for each in inspect.signature(verb).parameters.values() if each.name not in {*made, "given"}]

        def called(**typed: Any) -> None:
            given: Given = {section: {} for section in asked}
            for name, (section, key) in homes.items():
                if typed[name] not in (None, []):
                    given[section][key.key] = _as_given(name, key, typed[name], given[section].get(key.key, []))
            read: dict[str, Any] = {name: read_section(cls, given[name]) for name, cls in made.items()}
            if sections is not None:
                read["given"] = {name: given[name] for name in sections}
            verb(*(typed[each.name] for each in own), **read)

        plain = [each.replace(annotation=hints[each.name], kind=each.KEYWORD_ONLY) for each in own]
        parameters = [*plain, *(_parameter(name, *home, (also or {}).get(name)) for name, home in homes.items())]
        called.__name__, called.__doc__ = verb.__name__, verb.__doc__
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.usual = usual  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        return called

    return decorate


def _as_given(name: str, key: Key, value: Any, chosen: list[str]) -> Any:
    """What was typed as a file would have it; a choice of several is a flag, and joins those chosen before it."""
    if name not in (key.key, key.name):
        others = [each for each in chosen if each != name]
        return [*others, name] if value else others
    if key.is_many and key.kind is not Path:
        return ",".join(value)
    return str(value) if isinstance(value, Path) else value


def _parameter(name: str, section: str, key: Key, other: str | None) -> inspect.Parameter:
    """The parameter of an option, as typer reads it; its help has the sentence, the choices and the default."""
    is_choice = name not in (key.key, key.name)
    is_flag, option = is_choice or key.kind is bool, f"--{name}" if is_choice else key.option
    kind: Any = bool if is_flag else list[str] if key.is_many else key.kind if key.kind in (int, float, Path) else str
    words = [f"{option}/--no-{option[2:]}" if is_flag else option, *(["-o"] if name == "out" else [])]
    text = f"log to {name} too" if is_choice else key.about.rstrip(".")
    if not is_choice and key.choices:
        text = f"{text}: {', '.join(key.choices[:-1])} or {key.choices[-1]}"
    if not is_choice and key.is_many:
        text += "; may be repeated"
    if key.default not in (None, MISSING, False, (), ""):
        told = ",".join(map(str, key.default)) if isinstance(key.default, tuple) else key.default
        text += f" ({'yes' if key.default is True else told})"
    values: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}
    metavar = values.get(key.kind, "TEXT") if not is_flag else "no" if key.default in (None, True) else None
    shown = typer.Option(
        *words, *filter(None, [other]), help=text, rich_help_panel=_PANELS.get(section), metavar=metavar
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, shown]
    )
