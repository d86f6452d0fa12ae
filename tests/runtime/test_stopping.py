"""An early end: every worker finishes the same last batch, whoever was ahead when it was agreed on."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
from torch.distributed import HashStore

from stagewright.runtime.run_folder import STOP_FILE
from stagewright.runtime.safety.stopping import Gate, Stopper
from stagewright.runtime.world import Words, World
from stagewright.scheduling import make_schedule
from tests.runtime.cases import Case, plan_of

NAMES = tuple(f"l{number}" for number in range(6))
SCHEDULE = make_schedule(plan_of(Case("3-1", staleness="ssp", microbatches=1), NAMES))
REACH = SCHEDULE.offsets[1] - SCHEDULE.offsets[0]


def world(worker: int, store: HashStore | None, size: int = 2) -> World:
    return World(worker, size, torch.device("cpu"), timedelta(seconds=5), store=store)


def batches(gate: Gate, worker: int) -> list[int]:
    """The batches of all actions that pass, of a run that would be very long."""
    return [action.batch for action in gate.passing(SCHEDULE.unroll(worker, 10**9), REACH)]


def test_no_wish_lets_everything_pass() -> None:
    gate = Gate()
    order = list(SCHEDULE.unroll(0, 20))
    assert list(gate.passing(iter(order), REACH)) == order


def test_the_end_comes_soon_and_the_last_batch_is_whole() -> None:
    gate = Gate()
    order = gate.passing(SCHEDULE.unroll(0, 10**9), REACH)
    passed = list(islice(order, 50))
    gate.agree(gate.promise() + 3)
    passed += order
    last = gate.last
    assert passed == list(SCHEDULE.unroll(0, last + 1))


def test_nobody_begins_a_batch_beyond_its_promise_before_all_have_agreed() -> None:
    gate, seen = Gate(), []
    promise = gate.promise()
    thread = threading.Thread(target=lambda: seen.extend(batches(gate, 0)))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    gate.agree(promise + 5)
    thread.join(60)
    assert max(seen) == promise + 5


def test_workers_agree_on_the_one_that_is_furthest(tmp_path: Path) -> None:
    store, gates = HashStore(), [Gate(), Gate(7)]
    for worker in range(2):
        (tmp_path / str(worker)).mkdir()
    words = Words(store, b"secret")
    stoppers = [Stopper(gates[worker], world(worker, store), tmp_path / str(worker), words, ()) for worker in range(2)]
    with stoppers[0].listening(), stoppers[1].listening():
        (tmp_path / "1" / STOP_FILE).touch()
        deadline = time.monotonic() + 60
        while None in (gates[0].last, gates[1].last) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert (gates[0].last, gates[1].last) == (7, 7)
    assert [stopper.cause for stopper in stoppers] == ["a signal to the launcher"] * 2


def test_a_signal_is_heard_and_its_old_meaning_comes_back(tmp_path: Path) -> None:
    before, gate = signal.getsignal(signal.SIGUSR1), Gate()
    with Stopper(gate, world(0, None, 1), tmp_path, None, (signal.SIGUSR1,)).listening() as stopper:
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline = time.monotonic() + 60
        while gate.last is None and time.monotonic() < deadline:
            time.sleep(0.01)
    assert (stopper.cause, gate.last) == ("SIGUSR1", 0)
    assert signal.getsignal(signal.SIGUSR1) == before
