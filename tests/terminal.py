"""A command on a terminal of so many columns: what stands on its screen, and what was written to it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from pathlib import Path

CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07")


def typed(*words: str, columns: int, folder: Path, seconds: float = 120) -> tuple[int, str]:
    """Runs a command on a terminal; its exit status, and all that it wrote."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        left_out = ("COLUMNS", "LINES", "NO_COLOR", "CI")
        kept = {key: value for key, value in os.environ.items() if key not in left_out}
        # The size is set by the child itself, so that it is there before anyone asks for it.
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        os.execve(words[0], words, kept | {"TERM": "xterm-256color"})
    written, deadline = b"", time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            if select.select([terminal], [], [], 1)[0]:
                try:
                    more = os.read(terminal, 1 << 16)
                except OSError:  # the other end is closed
                    break
                if not more:
                    break
                written += more
        else:
            raise TimeoutError(written.decode(errors="replace")[-2000:])
    finally:
        os.close(terminal)
        if time.monotonic() >= deadline:
            os.kill(process, 9)
        _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), written.decode("utf-8", "replace")


def lines_of(written: str) -> list[str]:
    """Every line that was ever on the screen, without colours: what is drawn over counts too."""
    return [line.rstrip() for line in re.split(r"\r?\n|\r", CODES.sub("", written))]
