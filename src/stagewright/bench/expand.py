"""Inheritance and matrices: what a suite file says → one mapping of keys for each case.

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

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from stagewright.errors import UsageError
from stagewright.schema import shown

_Keys = Mapping[str, Any]
_OWN_KEYS = ("like", "matrix", "without")


def expand(defaults: _Keys, settings: Mapping[str, _Keys], cases: Sequence[_Keys]) -> list[dict[str, Any]]:
    """The keys of every case, matrices and inheritance written out."""
    made = []
    for number, case in enumerate(cases):
        if not isinstance(case.get("name"), str) or not case["name"]:
            raise UsageError(f"case number {number + 1} has no name", "give it one: name: vgg16-dp")
        for chosen in _combinations(case):
            made.append(_inherit(defaults, settings, case, chosen))
    return made


def _combinations(case: _Keys) -> Iterator[dict[str, Any]]:
    """One value of every axis of a case's matrix, in the order in which they are written; but those left out."""
    matrix = case.get("matrix", {})
    where = f"case {case['name']!r}: key matrix"
    if not isinstance(matrix, Mapping):
        raise UsageError(f"{where} is {shown(matrix)}: expected lists of values by key")
    for key, values in matrix.items():
        if not isinstance(values, list) or not values:
            raise UsageError(f"{where}.{key} is {shown(values)}: expected a list of values")
        if key in case and key != "like":
            raise UsageError(f"case {case['name']!r}: key {key} is given and is in the matrix", "leave one of them out")
    excluded = _left_out(case)
    for values in product(*matrix.values()):
        chosen = dict(zip(matrix, values))
        if not any(all(chosen.get(key) == value for key, value in some.items()) for some in excluded):
            yield chosen


def _left_out(case: _Keys) -> Sequence[_Keys]:
    """The combinations that a case goes without; each must name axes of its matrix."""
    excluded = case.get("without", [])
    for some in excluded if isinstance(excluded, list) else [excluded]:
        if not isinstance(some, Mapping) or not some or not some.keys() <= case.get("matrix", {}).keys():
            raise UsageError(
                f"case {case['name']!r}: key without holds {shown(some)}: expected values of keys of the matrix"
            )
    return excluded  # type: ignore[no-any-return]


def _inherit(defaults: _Keys, settings: Mapping[str, _Keys], case: _Keys, chosen: _Keys) -> dict[str, Any]:
    """The keys of one case of a matrix, and its name."""
    own = {key: value for key, value in case.items() if key not in (*_OWN_KEYS, "name")}
    direct = {key: value for key, value in chosen.items() if not isinstance(value, Mapping) and key != "like"}
    bundles = [dict(value) for value in chosen.values() if isinstance(value, Mapping)]
    likes = [*_names_of(case.get("like"), case["name"]), *_names_of(chosen.get("like"), case["name"])]
    made = dict(defaults)
    for keys in (*(_inherited(name, settings, ()) for name in likes), own, *bundles, direct):
        made.update({key: value for key, value in keys.items() if key != "name"})
    made["name"] = _name_of(case["name"], made, chosen)
    return made


def _names_of(like: object, case: str) -> list[str]:
    """The settings that a `like` names: one, or a list."""
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
