"""Who this process is: a worker that this, torchrun or SLURM started, or the one that starts workers of its own.

this process          RANK is set     SLURM_PROCID is set     neither
is                    a worker        a worker                the one that starts workers of its own
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path

from stagewright.errors import RunError

RUN_FOLDER = "STAGEWRIGHT_RUN_FOLDER"
"""The variable that tells workers where the run keeps its files."""
STORE = "STAGEWRIGHT_STORE"
"""The variable that names the file in which the workers of one host meet."""
RESTARTED = "STAGEWRIGHT_RESTARTED"
"""The variable that tells workers that others ran before them in the same run: its folder has the schedule now."""


def is_worker() -> bool:
    """Whether a launcher started this process as a worker; SLURM's variables are turned into torch's."""
    if "RANK" in os.environ:
        return True
    if "SLURM_PROCID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        os.environ.update(_from_slurm(os.environ))
        return True
    return False


def is_main() -> bool:
    """Whether this process is the one that prints and saves for all: the one that starts workers, or else worker 0.

    What follows `train` in a script runs in every worker. Those that are started here run beside the one that started
    them, whose word it is; under torchrun or SLURM there is none, and worker 0 speaks.
    """
    return not is_worker() or (RUN_FOLDER not in os.environ and os.environ["RANK"] == "0")


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's variables out of SLURM's: the first host of the job is where the workers meet."""
    hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "localhost"))
    job = int(environment.get("SLURM_JOB_ID", "0") or 0)
    return {
        "RANK": environment["SLURM_PROCID"], "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR", next(iter(expand_hosts(hosts)), "localhost")),
        "MASTER_PORT": environment.get("MASTER_PORT", str(20_000 + job % 20_000)),
    }  # fmt: skip


def expand_hosts(text: str) -> tuple[str, ...]:
    """Every host that a list names: `gpu[03-05,9],rack[1-2]-ib` is gpu03, gpu04, gpu05, gpu9, rack1-ib and rack2-ib."""
    names = list[str]()
    for word in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        parts = re.split(r"\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]", word)  # every second one stood in brackets
        choices = [_numbers(part) if place % 2 else [part] for place, part in enumerate(parts)]
        names += map("".join, product(*choices))
    return tuple(names)


def _numbers(spans: str) -> list[str]:
    """The numbers of `03-05,9`, as wide as they are written."""
    pairs = (span.partition("-") for span in spans.split(","))
    return [
        str(number).zfill(len(first))
        for first, _, last in pairs
        for number in range(int(first), int(last or first) + 1)
    ]


def this_command() -> list[str]:
    """The command that started this process, to start workers with."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        name = spec.name.removesuffix(".__main__")
        return [sys.executable, "-m", name, *sys.argv[1:]]
    script = getattr(main, "__file__", None)
    if not script or not Path(script).is_file():
        source = "it came on standard input" if script == "<stdin>" else "this Python session has none"
        raise RunError(
            f"workers run the script again, but {source}",
            "put the training into a file, or start the workers with torchrun",
        )
    return [sys.executable, *sys.argv]
