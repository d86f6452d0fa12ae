"""Checkpoints: what is saved is what was there, whole or not at all, and a run goes on from it under any plan."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stagewright.errors import CheckpointError, UsageError
from stagewright.runtime.checkpoint.resuming import whole_model
from stagewright.runtime.checkpoint.storage import (
    MANIFEST,
    SUMS,
    checkpoints_in,
    find_checkpoint,
    path_of,
    prune,
    read_manifest,
    sweep,
    write_tensors,
)
from stagewright.runtime.settings import Settings
from stagewright.runtime.world import World, open_world
from tests.runtime.cases import OPTIMIZERS, Case
from tests.runtime.reference import Tower, rows_of_batch, train_delayed
from tests.runtime.resuming import BATCH, STEPS, go_on
from tests.runtime.running import run_workers


@pytest.fixture
def world() -> World:
    with open_world(Settings()) as alone:
        yield alone


@pytest.fixture(scope="module")
def nine_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one worker with checkpoints after 3, 6 and 9 steps."""
    folder = tmp_path_factory.mktemp("saved")
    with open_world(Settings()) as alone:
        for _ in range(3):
            go_on(Case("1", batch=BATCH), folder, alone)
    return folder


@pytest.fixture
def saved(nine_steps: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to do harm to."""
    return shutil.copytree(nine_steps, tmp_path, dirs_exist_ok=True)


def reference(optimizer: str, steps: int) -> dict[str, torch.Tensor]:
    """The weights of one process that never stopped."""
    tower = Tower().double()
    stage_of = [0] * len(list(tower.parameters()))
    rows = lambda batch: rows_of_batch(batch, BATCH)  # noqa: E731
    _, weights = train_delayed(tower, rows, steps, stage_of, (1,), OPTIMIZERS[optimizer])
    return dict(zip((name for name, _ in tower.named_parameters()), weights))


def check_equal(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = whole_model(checkpoints_in(folder)[0])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-11, atol=1e-13), name


STALE = "3-1/sgd/ssp,3-1/sgd/ssp/sharded,3-1/sgd/ssp"


@pytest.fixture(scope="module")
def by_four_workers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a run that went 3-1 → 2-2 → dp 4, and of a stale one that was cut in three; some shard states."""
    plans, stale = tmp_path_factory.mktemp("plans"), tmp_path_factory.mktemp("stale")
    chain = "3-1/adamw/0/sharded,2-2/adamw/0/sharded,4/adamw/0"
    run_workers(4, "tests.runtime.resuming", str(plans), chain, str(stale), STALE)
    return plans, stale


@pytest.mark.timeout(240)
def test_a_run_goes_on_under_plan_after_plan(by_four_workers: tuple[Path, Path], world: World) -> None:
    """3-1 → 2-2 → dp 4 → 1, and the optimizer's state goes along: any other would show in the weights."""
    folder, _ = by_four_workers
    go_on(Case("1", optimizer="adamw", batch=BATCH), folder, world)
    assert [path.name for path in checkpoints_in(folder)] == [f"step-{step:08d}" for step in (12, 9, 6, 3)]
    check_equal(folder, reference("adamw", 4 * STEPS))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_seven_and_one_to_five_two_one_to_four_to_one(optimizer: str, tmp_path: Path, world: World) -> None:
    run_workers(8, "tests.runtime.resuming", str(tmp_path), f"7-1/{optimizer}/0,5-2-1/{optimizer}/0")
    run_workers(4, "tests.runtime.resuming", str(tmp_path), f"4/{optimizer}/0")
    go_on(Case("1", optimizer=optimizer, batch=BATCH), tmp_path, world)
    check_equal(tmp_path, reference(optimizer, 4 * STEPS))


@pytest.mark.timeout(240)
def test_versions_in_flight_go_along(by_four_workers: tuple[Path, Path]) -> None:
    """A stale run that is cut in three equals one that was not: slots, optimizer and batch numbers fit together."""
    tower = Tower().double()
    stage_of = [0] * 6 + [1] * 6
    rows = lambda batch: rows_of_batch(batch, BATCH)  # noqa: E731
    _, weights = train_delayed(tower, rows, 3 * STEPS, stage_of, (2, 1), OPTIMIZERS["sgd"])
    check_equal(by_four_workers[1], dict(zip((name for name, _ in tower.named_parameters()), weights)))


def test_a_scheduler_goes_on_where_it_stood(tmp_path: Path, world: World) -> None:
    for _ in range(3):
        go_on(Case("1", optimizer="scheduled", batch=BATCH), tmp_path, world)
    check_equal(tmp_path, reference("scheduled", 3 * STEPS))


def test_a_scheduler_that_nobody_could_save_is_refused(tmp_path: Path, world: World, monkeypatch: Any) -> None:
    monkeypatch.setitem(OPTIMIZERS, "hidden", lambda parameters: OPTIMIZERS["scheduled"](parameters)[0])
    with pytest.raises(UsageError, match=r"keeps it to itself[\s\S]*return optimizer, scheduler"):
        go_on(Case("1", optimizer="hidden", batch=BATCH), tmp_path, world)


@pytest.mark.parametrize("placement", ["1"])
def test_the_same_plan_goes_on_bit_for_bit(placement: str, tmp_path: Path, world: World) -> None:
    for folder, parts in (("whole", [6]), ("cut", [3, 3])):
        for steps in parts:
            go_on(Case(placement, optimizer="adamw", batch=BATCH), tmp_path / folder, world, steps)
    one, other = (whole_model(path_of(tmp_path / folder, 6)) for folder in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_every_file_of_a_checkpoint_is_watched(saved: Path) -> None:
    newest = checkpoints_in(saved)[0]
    for path in sorted(newest.iterdir()):
        whole = path.read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            words: list[str] = []
            found = find_checkpoint(saved, words.append)
            assert found is not None
            assert found[1]["step"] == 6, path.name
            assert "passed over" in words[0]
            assert newest.name in words[0]
        path.write_bytes(whole)
    assert find_checkpoint(saved, print)[1]["step"] == 9


@pytest.mark.parametrize("lost", [MANIFEST, SUMS, "part-0.safetensors"])
def test_a_torn_checkpoint_is_passed_over(lost: str, saved: Path) -> None:
    (checkpoints_in(saved)[0] / lost).unlink()
    words: list[str] = []
    assert find_checkpoint(saved, words.append)[1]["step"] == 6
    assert "torn" in words[0] or "damaged" in words[0]


def test_when_none_is_good_none_is_found(saved: Path) -> None:
    for path in checkpoints_in(saved):
        (path / SUMS).write_text("nonsense")
    words: list[str] = []
    assert find_checkpoint(saved, words.append) is None
    assert len(words) == 3


def test_half_written_ones_are_swept_and_old_ones_pruned(saved: Path) -> None:
    shutil.copytree(path_of(saved, 9), path_of(saved, 12).with_name(".step-00000012.part"))
    assert find_checkpoint(saved, print)[1]["step"] == 9
    sweep(saved)
    prune(saved, 2, set())
    assert sorted(path.name for path in (saved / "checkpoints").iterdir()) == ["step-00000006", "step-00000009"]


def test_tensors_are_read_by_safetensors_itself(tmp_path: Path) -> None:
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
    tensors = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    tensors.update(scalar=torch.tensor(3.5), empty=torch.zeros(0, 4), turned=torch.arange(6.0).reshape(2, 3).t())
    write_tensors(tmp_path / "x.safetensors", tensors)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensors[key]) and found[key].dtype == tensors[key].dtype for key in tensors)


def test_a_manifest_cannot_name_files_outside_its_folder(saved: Path) -> None:
    """Even with hashes that fit."""
    folder = checkpoints_in(saved)[0]
    manifest = json.loads((folder / MANIFEST).read_text())
    next(iter(manifest["tensors"].values()))["file"] = "../../secret.safetensors"
    (folder / MANIFEST).write_text(json.dumps(manifest))
    digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    sums = (folder / SUMS).read_text().splitlines()
    (folder / SUMS).write_text("".join(f"{digest}  {MANIFEST}\n" if MANIFEST in line else f"{line}\n" for line in sums))
    with pytest.raises(CheckpointError, match="in a way that cannot be"):
        read_manifest(folder)


def test_a_checkpoint_of_another_run_is_refused(saved: Path, world: World) -> None:
    with pytest.raises(CheckpointError, match="with batch 24, this one has 20"):
        go_on(Case("1", batch=20), saved, world)
