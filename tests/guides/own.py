"""The guide to one's own model and data, section by section, in a fresh folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import stagewright

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "own-model-and-data.md"


def do(heading: str, folder: Path, *, launcher: str = "python") -> str:
    """Writes the scripts of a section, types its commands, and returns what they print."""
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (section,) = [each for each in sections if each.startswith(heading)]
    said = []
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
        if language == "python":
            (folder / text.split()[1]).write_text(text)
            continue
        for line in text.splitlines():
            said.append(typed(re.sub(r"^python ", f"{launcher} ", line), folder))
    return "".join(said)


def typed(line: str, folder: Path) -> str:
    """What a command prints that ends well, with the programs of this environment."""
    bin = folder / "bin"
    bin.mkdir(exist_ok=True)
    for name, words in (("python", ""), ("stagewright", " -m stagewright"), ("torchrun", " -m torch.distributed.run")):
        (bin / name).write_text(f'#!/bin/sh\nexec {sys.executable}{words} "$@"\n')
        (bin / name).chmod(0o755)
    own = {
        **os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(stagewright.__file__).parents[1]),
    }  # fmt: skip
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=own, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout
