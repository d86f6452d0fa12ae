"""A store that loses requests: a folder behind fsspec's protocol `lossy`, here and in the processes of a run.

One in five requests fails: before it does anything, after it has done all, or, where it writes, half-way.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem

_draw = random.Random(int(os.environ.get("LOSSY_SEED", "1")))
LOST = float(os.environ.get("LOSSY_SHARE", "0.2"))


class LossyFileSystem(LocalFileSystem):
    """Files of this host, when it feels like it."""

    protocol = "lossy"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        path = os.fspath(path)
        return path if isinstance(path, list) else super()._strip_protocol(path.removeprefix("lossy://"))


def _losing(name: str) -> Any:
    kept = getattr(LocalFileSystem, name)

    def request(self: LossyFileSystem, *words: Any, **more: Any) -> Any:
        if _draw.random() >= LOST:
            return kept(self, *words, **more)
        how = _draw.choice(("before", "after", "half"))
        if how == "after":
            kept(self, *words, **more)
        if how == "half" and name == "put_file":
            whole = Path(words[0]).read_bytes()
            Path(self._strip_protocol(words[1])).write_bytes(whole[: len(whole) // 2])
        raise OSError(5, f"the request to {name} was lost")

    return request


for each in ("put_file", "get_file", "cat_file", "pipe_file", "rm_file", "rm", "ls", "makedirs", "open"):
    setattr(LossyFileSystem, each, _losing(each))
register_implementation("lossy", LossyFileSystem, clobber=True)


def make_known(folder: Path) -> None:
    """Leaves in a folder of PYTHONPATH what makes fsspec find the protocol, as an installed package would."""
    about = folder / "lossy-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lossy\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[fsspec.specs]\nlossy = tests.runtime.lossy:LossyFileSystem\n")
