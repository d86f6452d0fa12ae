"""Options made from the fields of frozen dataclasses: a verb says which sections it takes, and gets what was typed.

field         num_microbatches: int | None = None, and the sentence below it
option        --microbatches INTEGER    that sentence, the choices, the default; in the panel of its section
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING
from typing import Annotated, Any, get_type_hints

import typer

from stagewright.errors import UsageError
from stagewright.training.recipes import RecipeFile
from stagewright.training.sections import Key, read_section, section_keys, split_words

__all__ = ["COMPUTED", "Given", "computed", "read_section", "takes"]

COMPUTED = tuple(
    f"recipe.{each.key}" for each in section_keys(RecipeFile) if each.name not in ("optimizer", "precision")
)
"""What verbs that predict leave out of a recipe: all that changes neither time nor memory."""
Given = dict[str, dict[str, Any]]
"""By section and key what was typed; what was not is not there."""
_PANELS = {
    "data": "Data", "plan": "Plan", "recipe": "Recipe", "settings": "Computing", "job": "Job", "where": "Where",
    "rehearsal": "Rehearsal", "model": "Model",
}  # fmt: skip


def takes(
    sections: Mapping[str, type], *, without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a verb the options of these sections but those named; its parameter `given` gets what was typed."""
    homes = {
        name: (section, key)
        for section, cls in sections.items()
        for key in section_keys(cls)
        if key.key not in without and f"{section}.{key.key}" not in without
        for name in _names(key)
    }

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        own, hints = inspect.signature(verb).parameters, get_type_hints(verb, include_extras=True)
        first = [each for each in own.values() if each.kind is each.POSITIONAL_ONLY]
        last = [each for each in own.values() if each.kind is not each.POSITIONAL_ONLY and each.name != "given"]
        made = [_parameter(name, *home) for name, home in homes.items()]

        def called(**values: Any) -> None:
            typed = {name: values.pop(name) for name in homes}
            arguments = [values.pop(each.name) for each in first]
            verb(*arguments, given=_given(homes, typed), **values)

        plain = [each.replace(annotation=hints[each.name], kind=each.KEYWORD_ONLY) for each in (*first, *last)]
        parameters = [*plain[: len(first)], *made, *plain[len(first) :]]
        called.__name__, called.__doc__ = verb.__name__, verb.__doc__
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        return called

    return decorate


def computed(given: Given) -> RecipeFile:
    """The optimizer and the precision that were typed, for verbs that predict."""
    recipe = read_section(RecipeFile, given["recipe"])
    if recipe.precision == "fp64":
        raise UsageError("--precision is 'fp64': expected fp32, bf16 or fp16", "no device's fp64 rates are known")
    return recipe


def _names(key: Key) -> tuple[str, ...]:
    """The parameters of a key: a flag for each choice where several may be chosen, else one."""
    return key.choices if key.is_many and key.choices else (key.key,)


def _parameter(name: str, section: str, key: Key) -> inspect.Parameter:
    """The parameter of an option, as typer reads it."""
    is_flag = name != key.key or key.kind is bool
    kind: Any = bool if is_flag else list[str] if key.is_many else key.kind if key.kind in (int, float) else str
    option = key.option if name == key.key else f"--{name}"
    words = (f"{option}/--no-{option[2:]}",) if is_flag else ("-o", option) if key.key == "out" else (option,)
    shown = typer.Option(*words, help=_help(name, key), rich_help_panel=_PANELS.get(section), show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, shown]
    )


def _help(name: str, key: Key) -> str:
    """`steps between log lines (10)`: the field's sentence, its choices and its default."""
    if name != key.key:
        return f"log to {name} too"
    text = key.about.rstrip(".")
    if key.choices:
        text = f"{text}: {', '.join(key.choices[:-1])} or {key.choices[-1]}"
    if key.is_many:
        text += "; may be repeated"
    tells = key.default not in (None, MISSING, False, (), "")
    return f"{text} ({'yes' if key.default is True else key.default})" if tells else text


def _given(homes: Mapping[str, tuple[str, Key]], typed: Mapping[str, Any]) -> Given:
    """What was typed, by section and key."""
    made: Given = {section: {} for section, _ in homes.values()}
    for name, (section, key) in homes.items():
        value = typed[name]
        if value is None or value == []:
            continue
        if name != key.key:
            chosen = [each for each in made[section].get(key.key, []) if each != name]
            value = [*chosen, name] if value else chosen
        elif key.is_many:
            value = split_words(key, value)
        made[section][key.key] = value
    return made
