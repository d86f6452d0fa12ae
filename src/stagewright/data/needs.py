"""The packages that reading and writing images needs; a plain install has none of them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import get_args

from stagewright.data.writing import Format
from stagewright.errors import UsageError

_PACKAGES = {"PIL": "Pillow", "google.protobuf": "protobuf"}
"""The module and the package that has it; the extra `data` brings them all."""


def need(what: str, *modules: str) -> None:
    """Refuses what needs packages that are not installed, before any of it is done."""
    lacking = [_PACKAGES[module] for module in modules if not is_there(module)]
    if lacking:
        raise UsageError(
            f"{what} needs {' and '.join(lacking)}, which is not installed", "pip install 'stagewright[data]'"
        )


def check_format(format: str) -> None:
    """Refuses a --format that is unknown, or whose package is not installed."""
    if format not in get_args(Format):
        raise UsageError(f"--format is {format!r}: expected one of {', '.join(get_args(Format))}")
    if format == "ofrecord":
        need(f"--format {format}", "google.protobuf")


def is_there(module: str) -> bool:
    """Whether a module could be imported."""
    try:
        return find_spec(module) is not None
    except ImportError:  # its parent is missing
        return False
