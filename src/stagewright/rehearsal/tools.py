"""The system's own tools: ip and tc, and whether this process may use them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from stagewright.errors import RunError, UsageError

_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""What namespaces and limits take; root in a container may lack them."""


def check_tools() -> None:
    """Refuses to begin where hosts cannot be emulated: not Linux, not root, no iproute2."""
    why = missing()
    if why is not None:
        raise UsageError(f"emulated hosts need root on Linux with iproute2: {why}", "run it as root, or use `train`")


def missing() -> str | None:
    """What keeps this process from emulating hosts; None where nothing does."""
    if sys.platform != "linux":
        return f"this is {sys.platform}"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the command {tool} is not here"
    if os.geteuid() != 0:
        return f"this is user {os.geteuid()}"
    lacking = [name for name, bit in _CAPABILITIES.items() if not _capabilities() >> bit & 1]
    return f"this root lacks {' and '.join(lacking)}" if lacking else None


def _capabilities() -> int:
    """What this process may do, one bit each."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1], 16) if found else 0


def call(*command: str, text: str | None = None) -> str:
    """What a command prints; raises with its own words where it fails."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise RunError(f"`{' '.join(command)}` ended with status {done.returncode}", f"it said: {said[-1]}")
    return done.stdout


def works(*command: str) -> bool:
    """Whether a command ends well."""
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def batch(tool: str, lines: Sequence[str], namespace: str | None = None) -> None:
    """Runs many lines of ip or tc at once, inside a namespace where one is given."""
    where = ("-n", namespace) if namespace else ()
    call(tool, *where, "-batch", "-", text="\n".join(lines) + "\n")
