"""The leash: runs a command on another host for as long as the one who asked for it over ssh is there.

    launcher ── ssh ── a line every second ──▶ leash ── starts ──▶ torchrun ──▶ workers

When the lines end, because the launcher or ssh has ended, or when none has come for a while, because the host is cut
off, the command and all that it started are ended too. It stands on nothing but Python.

    python -m stagewright.runtime.launch.leash 300 torchrun …
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

from stagewright.runtime.launch.process import follow_parent


def hold_leash() -> None:
    """Gives this process a line a second to read, for as long as it is there."""
    ears, mouth = os.pipe()
    process = os.getpid()
    if os.fork() == 0:
        follow_parent(process)
        os.close(ears)
        with suppress(OSError):
            while os.write(mouth, b"\n"):
                time.sleep(1.0)
        os._exit(0)
    os.dup2(ears, 0)
    os.close(ears)
    os.close(mouth)


def _main(patience_s: float, command: list[str]) -> int:
    """Runs the command, and returns its exit status; ends it when nothing has been heard for so many seconds."""
    running = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=follow_parent)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    heard = time.monotonic()
    try:
        while running.poll() is None and time.monotonic() - heard < patience_s:
            ready, _, _ = select.select([sys.stdin], [], [], 0.1)
            if ready:
                if not os.read(sys.stdin.fileno(), 4096):
                    break
                heard = time.monotonic()
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(running.pid, number)
            with suppress(subprocess.TimeoutExpired):
                running.wait(2.0)  # who hears it ends at once, and torchrun waits long for those who do not
                break
    return running.returncode if running.returncode >= 0 else 128 - running.returncode


if __name__ == "__main__":
    sys.exit(_main(float(sys.argv[1]), sys.argv[2:]))
