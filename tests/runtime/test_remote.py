"""Copies of checkpoints in a store that loses requests: no torn one is ever taken, and no good one is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from stagewright.cli import main
from stagewright.errors import CheckpointError, UsageError
from stagewright.runtime.checkpoint import remote
from stagewright.runtime.checkpoint.remote import Copier, Store, fetch, run_at
from stagewright.runtime.checkpoint.resuming import whole_model
from stagewright.runtime.checkpoint.storage import (
    finish,
    part_of,
    path_of,
    read_manifest,
    write_part,
)
from stagewright.runtime.settings import Settings
from stagewright.runtime.world import World, open_world
from tests.runtime import lossy

ROOT = Path(__file__).parents[2]


@pytest.fixture
def world() -> World:
    with open_world(Settings()) as alone:
        yield alone


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are made again at once."""
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)


def write(folder: Path, step: int, run: str = "mine") -> Path:
    """A finished checkpoint whose weights say of which step they are."""
    path = path_of(folder, step)
    parts = [write_part(path, worker, {f"model/{worker}": torch.full((64,), float(step))}) for worker in range(3)]
    finish(path, {"step": step, "run": run, "model": "x", "aliases": {}}, parts)
    return path


def copier_of(url: str, world: World, keep: int = 2) -> Copier:
    return Copier(Store.open(url), world, keep=keep, run="mine", limit_s=60.0)


def send(copier: Copier, path: Path) -> None:
    """Copies all parts, as several workers would."""
    for worker in (1, 2):
        copier.store._make(f"{copier.store.root}/{path.name}")
        copier.store.send(path, part_of(worker))
    copier.finish(path)


@pytest.mark.usefixtures("quick")
def test_no_torn_copy_is_ever_taken_and_the_newest_good_one_never_goes(tmp_path: Path, world: World) -> None:
    """120 rounds: each copies one or is broken off; now and then another host goes on with the newest that is good."""
    copier, there, newest = copier_of(f"lossy://{tmp_path}/store", world), tmp_path / "store", 0
    failed = 0
    for step in range(1, 121):
        path = write(tmp_path / "run", step)
        try:
            if step % 7 == 0:  # the process ends in the middle
                copier.store.open_for(path)
                copier.store.send(path, part_of(0))
            else:
                send(copier, path)
                failed += copier.fault is not None
        except CheckpointError:
            failed += 1
        good = [entry.name for entry in there.iterdir() if entry.name.startswith("step-") and is_good(entry)]
        assert int(max(good)[5:]) >= newest
        newest = int(max(good)[5:])
        if step % 20 == 0:
            taken = fetch(Store.open(f"lossy://{there}"), tmp_path / "other", "another", 0, lambda text: None, world)
            if taken is not None:  # what cannot be read five times over is passed over too
                assert {float(x) for t in whole_model(taken[0]).values() for x in t} == {float(taken[1]["step"])}
                assert is_good(there / path_of(there, taken[1]["step"]).name)
        shutil.rmtree(path)
    assert newest > 110
    assert failed < 6, "requests that are lost are made again"
    assert len(list(there.glob("step-*"))) < 10


def is_good(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return True


def test_a_store_that_keeps_half_of_a_file_is_found_out(tmp_path: Path, world: World, monkeypatch) -> None:
    """It says that all went well: the older copies stay."""
    copier = copier_of(f"file://{tmp_path}/store", world, keep=1)
    send(copier, write(tmp_path, 1))
    plain = copier.store.system.put_file

    def half(here: str, there: str) -> None:
        plain(here, there)
        if there.endswith(part_of(1)):
            Path(there).write_bytes(Path(there).read_bytes()[:9])

    monkeypatch.setattr(copier.store.system, "put_file", half)
    send(copier, write(tmp_path, 2))
    assert "has lost part-1.safetensors" in str(copier.fault)
    with pytest.raises(CheckpointError, match="torn"):
        copier.store.check("step-00000002")
    assert copier.store.check("step-00000001")["step"] == 1


def test_damaged_parts_are_named_and_pruning_keeps_what_is_good(tmp_path: Path, world: World) -> None:
    MemoryFileSystem.store.clear()
    copier = copier_of("memory://kept", world, keep=9)
    for step in (1, 2, 3, 4):
        send(copier, write(tmp_path, step))
    send(copier, write(tmp_path, 9, run="of another"))
    store = copier.store
    for worker in (0, 2):
        store.system.pipe_file(f"/kept/step-00000004/{part_of(worker)}", b"damaged")
    with pytest.raises(CheckpointError, match=r"part-0.safetensors is not.*part-2.safetensors is not"):
        store.check("step-00000004")
    store.prune(1, "mine", lambda name: name == "step-00000003")
    assert store.names() == ["step-00000009", "step-00000004", "step-00000003"]


def test_the_verbs_list_verify_and_prune_a_runs_folder_and_a_url(tmp_path: Path, capsys) -> None:
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step)
    (path_of(tmp_path, 5) / part_of(1)).unlink()
    (path_of(tmp_path, 4) / part_of(0)).write_bytes(b"damaged")
    os.mkfifo(path_of(tmp_path, 5) / part_of(1))  # must not be waited for
    for where in (str(tmp_path), f"file://{tmp_path}/checkpoints"):
        status, said = run("list", where, capsys)
        assert (status, said.count("whole")) == (0, 5)
        status, said = run("verify", where, capsys)
        assert status == 1
        assert "part-0.safetensors is not as it was written" in said
        assert "it is no plain file (part-1.safetensors)" in said
        assert said.count(": good") == 3
    status, said = run("prune", where, capsys, "--keep", "2")
    assert (
        said
        == "removed 1 checkpoint: step-00000001; " + ", ".join(f"step-0000000{n}" for n in (5, 4, 3, 2)) + " stay\n"
    )
    assert run("prune", where, capsys, "--keep", "0")[0] == 2
    assert run("list", str(tmp_path / "nowhere"), capsys)[0] == 2


def run(verb: str, where: str, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoints", verb, where, *words])
    return int(ended.value.code or 0), capsys.readouterr().out


def test_the_run_of_a_store_is_gone_on_with_or_it_is_refused(tmp_path: Path, world: World) -> None:
    url = f"file://{tmp_path}/store"
    assert run_at(url, None, resume=None, goes_on=False) is None
    for step in (1, 2):
        send(copier_of(url, world), write(tmp_path, step))
    for resume in ("auto", url, f"{url}/step-00000002"):
        assert run_at(url, None, resume=resume, goes_on=False) == "mine"
    for resume, why in (
        (None, "those of another run"),
        ("elsewhere", "another run"),
        (f"{url}/step-00000001", "later"),
    ):
        with pytest.raises(UsageError, match=why):
            run_at(url, None, resume=resume, goes_on=False)


@pytest.mark.timeout(240)
def test_two_workers_copy_while_they_train_and_go_on_on_another_disk(tmp_path: Path) -> None:
    """Over a store that loses every fifth request; the run's folder is gone, and its id is not."""
    lossy.make_known(tmp_path)
    store = f"lossy://{tmp_path}/store"
    first = train(tmp_path, store, "--steps", "20")
    assert "copy: step 20 copied to" in first
    (tmp_path / "run").rename(tmp_path / "lost")
    second = train(tmp_path, store, "--steps", "24", "--resume", "auto")
    assert f"resume: going on after step 20, from {store}" in second
    assert "copy: step 24 copied to" in second
    one, other = (whole_model(path_of(tmp_path / name, 20)) for name in ("run", "lost"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    kept = [path for path in sorted((tmp_path / "store").glob("step-*")) if is_good(path)]
    assert (kept[-1].name, len(kept) < 6) == ("step-00000024", True)


def train(folder: Path, store: str, *words: str) -> str:
    """What a run of two workers says."""
    command = [
        *(sys.executable, "-m", "stagewright", "train", "tiny-cnn", "--device", "cpu", "--batch", "8"),
        *("--devices", "2", "--checkpoint-every", "4", "--threads", "1", "-o", str(folder / "run")),
        *("--checkpoints", store, *words),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), str(ROOT / "src")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout
