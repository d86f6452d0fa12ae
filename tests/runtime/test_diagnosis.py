"""From the flight recorders: who waited for whom, and who is to blame."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from stagewright.cli import main
from stagewright.errors import RunError
from stagewright.runtime.launch.local import _explain
from stagewright.runtime.run_folder import _IDENTITY, SCHEDULE_FILE
from stagewright.runtime.safety.diagnosis import Scene
from stagewright.runtime.safety.flight import (
    _HEAD,
    _SIZE,
    Confession,
    Flight,
    Trace,
    _path_of,
)
from stagewright.runtime.safety.watchdog import LastWords
from stagewright.schedule import Action, Kind, Schedule
from stagewright.scheduling import make_schedule
from tests.runtime.cases import Case, plan_of

NAMES = tuple(f"l{number}" for number in range(6))


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def schedule_of(case: Case) -> Schedule:
    return make_schedule(plan_of(case, NAMES))


def fly(folder: Path, schedule: Schedule, until: dict[int, str], batches: int = 3, timeout_s: float = 300.0) -> None:
    """Recorders of workers that ran their orders and stand at an action of the last batch: {0: "B0.1", …}."""
    schedule.save(folder / SCHEDULE_FILE)
    for worker, text in until.items():
        flight = Flight(folder, worker, timeout_s)
        stop = Action.parse(text)._replace(batch=batches - 1)
        for action in schedule.unroll(worker, batches):
            flight.note(action)
            if action == stop:
                break
        else:
            raise AssertionError(f"{text} is not in the order of worker {worker}")
        flight.close()


def end(folder: Path, schedule: Schedule, worker: int, fault: Exception) -> None:
    """Has a worker leave its last words."""
    LastWords(schedule, 5.0, worker, folder).of(fault)


def test_the_one_that_all_wait_for_is_named(tmp_path: Path) -> None:
    schedule = schedule_of(Case("3-1"))
    fly(tmp_path, schedule, {0: "B0.0", 1: "B0.0", 2: "B0.0", 3: "F1.0"})
    found = Scene.read(schedule, tmp_path).blame()
    assert found.worker == 3
    assert found.why == "kept the others waiting at F1.0 of batch 2, microbatch 0"
    assert found.evidence[0] == (
        "worker 0 waited at B0.0 of batch 2, microbatch 0 for worker 3 (stage 1, device 0:3), which stands at F1.0 of "
        "batch 2, microbatch 0"
    )


def test_a_chain_of_waits_ends_at_its_beginning(tmp_path: Path) -> None:
    """3 waits for 1's rows, 0 and 2 wait for 3: it is 1."""
    schedule = schedule_of(Case("3-1"))
    fly(tmp_path, schedule, {0: "B0.1", 1: "F0.1", 2: "B0.1", 3: "F1.1"})
    assert Scene.read(schedule, tmp_path).blame().worker == 1


def test_one_that_is_late_for_the_reduction(tmp_path: Path) -> None:
    schedule = schedule_of(Case("4"))
    fly(tmp_path, schedule, {0: "U0", 1: "U0", 2: "B0.2", 3: "U0"})
    found = Scene.read(schedule, tmp_path).blame()
    assert (found.worker, len(found.evidence)) == (2, 3)


def test_a_worker_that_never_flew(tmp_path: Path) -> None:
    schedule = schedule_of(Case("3-1"))
    fly(tmp_path, schedule, {0: "B0.0", 1: "B0.0", 2: "B0.0"})
    assert Scene.read(schedule, tmp_path).blame().worker == 3
    assert "has left no trace" in Scene.read(schedule, tmp_path).blame().evidence[0]


def test_a_fault_of_its_own_comes_before_echoes(tmp_path: Path) -> None:
    schedule = schedule_of(Case("3-1"))
    fly(tmp_path, schedule, {0: "B0.0", 1: "F0.1", 2: "B0.0", 3: "F1.0"})
    end(tmp_path, schedule, 0, RuntimeError("Connection closed by peer [127.0.0.1]:1"))
    end(tmp_path, schedule, 1, ValueError("bad label"))
    found = Scene.read(schedule, tmp_path).blame()
    assert (found.worker, found.evidence) == (1, ("ValueError: bad label",))


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ("lost", "host d (10.0.0.4) does not answer any more"),
        ("links", "the link between host d (10.0.0.4) and others does not take what is sent"),
    ],
)
def test_a_host_that_is_cut_off_names_all_others_and_is_named_by_more(field: str, why: str, tmp_path: Path) -> None:
    schedule = schedule_of(Case("4"))
    fly(tmp_path, schedule, dict.fromkeys(range(4), "U0"))
    for worker in range(3):
        Confession("it waited", own=False, **{field: ("d (10.0.0.4)",)}).write(tmp_path, worker)
    Confession("it waited", own=False, **{field: ("a (10.0.0.1)", "b (10.0.0.2)")}).write(tmp_path, 3)
    assert Scene.read(schedule, tmp_path).blame().why == why


def test_a_killed_one_comes_first(tmp_path: Path) -> None:
    schedule = schedule_of(Case("3-1"))
    fly(tmp_path, schedule, {0: "B0.0", 1: "B0.0", 2: "B0.0", 3: "F1.0"})
    assert Scene.read(schedule, tmp_path, {0: 1, 2: -9, 3: -15}).blame().worker == 2


@pytest.mark.parametrize(
    "said",
    [
        RunError("no rows came within 5 s"),
        RuntimeError("Timed out waiting 5000ms for recv operation"),
        SystemExit(143),  # of a script's own handler, when all are ended by SIGTERM
    ],
)
def test_what_a_worker_only_heard_of_is_no_fault_of_its_device(said: Exception, tmp_path: Path) -> None:
    """All had begun the reduction, and one says that nothing came: who hung in it nobody knows, so no device goes."""
    schedule = schedule_of(Case("4"))
    fly(tmp_path, schedule, dict.fromkeys(range(4), "U0"))
    end(tmp_path, schedule, 0, said)
    found = Scene.read(schedule, tmp_path, {0: 1}).blame()
    assert not found.is_own
    assert _explain(schedule.plan, tmp_path, {0: 1}).worker is None


def test_one_that_gave_no_sign_of_life_while_the_others_waited(tmp_path: Path) -> None:
    """All stand at the same action, as replicas do in a reduction: the one that was stopped could not beat."""
    schedule = schedule_of(Case("4"))
    fly(tmp_path, schedule, dict.fromkeys(range(4), "U0"), timeout_s=10.0)
    for worker in (0, 1, 3):
        raw = bytearray(_path_of(tmp_path, worker).read_bytes())
        count, process, beat, limit = _HEAD.unpack_from(raw)
        _HEAD.pack_into(raw, 0, count, process, beat + 10.0, limit)
        _path_of(tmp_path, worker).write_bytes(raw)
        write_json(tmp_path / f"worker-{worker}.error.json", {"what": f"worker {worker} waited at U0", "own": False})
    found = Scene.read(schedule, tmp_path).blame()
    assert (found.worker, found.is_own) == (2, True)
    assert found.why == "gave no sign of life any more at U0 of batch 2: it was stopped or cut off"
    who = "worker 2 (stage 0, device 0:2), which gave no sign of life any more at U0 of batch 2"
    assert Scene.read(schedule, tmp_path).verdict(0, 10.0) == f"worker 0 waited at U0 of batch 2 for {who}"
    assert Scene.read(schedule, tmp_path).verdict(2, 10.0) == "worker 2 waited at U0 of batch 2 for more than 10 s"


def test_the_users_own_exception_comes_before_what_others_abort_with(tmp_path: Path) -> None:
    schedule = schedule_of(Case("4"))
    fly(tmp_path, schedule, dict.fromkeys(range(4), "U0"))
    write_json(tmp_path / "worker-2.error.json", {"what": "TimeoutError: timed out (train.py, line 3)", "own": True})
    found = Scene.read(schedule, tmp_path, {0: -6, 1: -6, 2: 1, 3: -15}).blame()
    assert (found.worker, found.evidence[0]) == (2, "TimeoutError: timed out (train.py, line 3)")


@pytest.mark.parametrize("damage", [b"", b"x" * 5, b"\xff" * _SIZE, bytes(_SIZE)])
def test_a_damaged_recorder_is_no_trace(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "worker-0.flight").write_bytes(damage)
    assert Trace.read(tmp_path, 0) is None


def test_the_doctor_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = schedule_of(Case("3-1"))
    fly(tmp_path, schedule, {0: "B0.0", 1: "B0.0", 2: "B0.0", 3: "F1.0"})
    end(tmp_path, schedule, 0, RuntimeError("[/closed.cc:78] Timed out"))
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(tmp_path)])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert "culprit: worker 3 (stage 1, device 0:3) kept the others waiting" in " ".join(out.split())


@pytest.mark.parametrize(("state", "says"), [("finished", "it finished"), ("stopped", "it was stopped")])
def test_the_doctor_blames_nobody_for_a_run_that_ended_well(
    state: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even where some stood at other actions than those they waited for."""
    fly(tmp_path, schedule_of(Case("3-1")), {0: "B0.0", 1: "B0.0", 2: "B0.0", 3: "F1.0"})
    write_json(tmp_path / _IDENTITY, {"id": "x", "state": state})
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(tmp_path)])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert says in out
    assert "culprit" not in out


def test_the_doctor_tells_of_replicas_that_diverged_and_of_the_last_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even of a run that ended well."""
    fly(tmp_path, schedule_of(Case("3-1")), {0: "U0"})
    write_json(tmp_path / _IDENTITY, {"id": "x", "state": "finished"})
    told = [
        ("replicas", "worker 1 has other weights"),
        ("copy", "step 5 could not be copied: no room"),
        ("copy", "step 9 could not be copied: \x1b[2J away"),
        ("checkpoint", "step 9 saved"),
    ]
    lines = [json.dumps({"event": kind, "text": text}) for kind, text in told]
    (tmp_path / "events.jsonl").write_text("\n".join([*lines, "torn"]))
    for options in ([], ["--json"]):
        with pytest.raises(SystemExit):
            main(["doctor", str(tmp_path), *options])
    text, _, plain = capsys.readouterr().out.partition("{")
    assert [
        line.strip() for line in text.splitlines() if line.strip().startswith(("replicas", "copy", "checkpoint"))
    ] == [
        "replicas: worker 1 has other weights",
        "copy: step 9 could not be copied: \\x1b[2J away",
    ]
    assert len(json.loads("{" + plain)["health"]) == 2


def test_codes_in_files_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fly(tmp_path, schedule_of(Case("3-1")), {0: "B0.0", 1: "B0.0", 2: "B0.0", 3: "F1.0"})
    write_json(
        tmp_path / "worker-3.error.json", {"what": "\x1b]0;pwned\x07\x1b[2J ValueError: \u202e\x9b31m", "own": True}
    )
    with pytest.raises(SystemExit):
        main(["doctor", str(tmp_path)])
    out = capsys.readouterr().out
    assert "\\x1b]0;pwned\\x07" in out
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(out)


def test_the_doctor_wants_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(tmp_path)])
    assert ended.value.code == 2
    assert "is no folder of a run" in capsys.readouterr().err


def test_memory_is_noted_beside_the_actions_and_recorders_from_before_that_are_read(tmp_path: Path) -> None:
    with closing(Flight(tmp_path, 0)) as flight:
        flight.note(Action(Kind.FORWARD, 0, 3, 1))
        flight.note_memory(7 << 30)
    whole = Trace.read(tmp_path, 0)
    assert whole is not None
    assert Trace.memory_of(tmp_path, 0) == 7 << 30
    file = tmp_path / "worker-0.flight"
    file.write_bytes(file.read_bytes()[:-8])
    assert Trace.read(tmp_path, 0) == whole
    assert (Trace.memory_of(tmp_path, 0), Trace.memory_of(tmp_path, 1)) == (0, 0)
