"""The end of a run: nobody leaves while a thread still has tensors to let go of."""

from __future__ import annotations

import hashlib
import threading
import time

from stagewright.runtime.world import _let_threads_finish


def test_a_busy_thread_is_waited_for() -> None:
    # Outside of Python and busy, as a thread of gloo is; some tenths of a second on any machine.
    busy = threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"word", b"salt", 200_000))
    busy.start()
    _let_threads_finish(timeout_s=60.0)
    assert not busy.is_alive()


def test_a_thread_that_never_ends_is_not_waited_for() -> None:
    stop = threading.Event()

    def turn() -> None:
        while not stop.is_set():
            hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 10_000)

    endless = threading.Thread(target=turn)
    endless.start()
    started = time.monotonic()
    _let_threads_finish(timeout_s=0.2)
    assert time.monotonic() - started >= 0.2
    assert endless.is_alive()
    stop.set()
    endless.join(timeout=10)
