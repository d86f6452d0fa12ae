"""Checkpoint files: each worker's tensors as safetensors, hashed, whole or not at all.

    checkpoints/step-00000300/
        part-0.safetensors …   the tensors that worker 0 … wrote
        manifest.json          which tensor is in which file, and the state that is no tensor
        SHA256SUMS             the hash of every file above, as sha256sum -c reads it

A checkpoint is written into `.step-00000300.part`, brought to the disk, and renamed. It is good when every file that
SHA256SUMS lists is as it was written. Nothing in it is a pickle: JSON and raw numbers only.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stagewright.errors import CheckpointError, StagewrightError
from stagewright.runtime.run_folder import CHECKPOINTS, read_identity
from stagewright.runtime.world import World, gather_json

Tensors = dict[str, Tensor]
MANIFEST, SUMS = "manifest.json", "SHA256SUMS"
_FORMAT, _VERSION = "stagewright.checkpoint", 2
_FILE = re.compile(r"part-\d{1,6}\.safetensors")
_LINE = re.compile(rf"([0-9a-f]{{64}})  ({re.escape(MANIFEST)}|{_FILE.pattern})")
STEP = re.compile(r"step-(\d{8,18})")
"""What a checkpoint is called."""


# In the folder of a run


def path_of(run_folder: Path, step: int) -> Path:
    """The folder of the checkpoint after so many steps."""
    return run_folder / CHECKPOINTS / f"step-{step:08d}"


def checkpoints_in(folder: Path, *, own: bool = False) -> list[Path]:
    """The checkpoints in a folder, or in the folder of a run, newest first, good or not; one of them is itself.

    With `own` those that say they are of another run are left out.
    """
    if STEP.fullmatch(folder.name):
        return [folder]
    inside = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    entries = list(inside.iterdir()) if inside.is_dir() else []
    found = [(int(match[1]), entry) for entry in entries if (match := STEP.fullmatch(entry.name))]
    return [entry for _, entry in sorted(found, reverse=True) if not own or _is_of_run(entry, folder)]


def _is_of_run(path: Path, folder: Path) -> bool:
    """Whether a checkpoint is of the run in a folder; those of older versions do not say, and any is of no run."""
    run, said = (read_identity(folder) or {}).get("id"), None
    with suppress(OSError, ValueError, AttributeError):
        said = json.loads(_read_plain(path / MANIFEST)).get("run")
    return run is None or said is None or said == run


def find_checkpoint(
    folder: Path, tell: Callable[[str], None], world: World | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """The newest good checkpoint and its manifest; `folder` is that of a run, which must be its run, or a checkpoint.

    Of those that are torn, damaged or of another run `tell` hears why they are passed over. With a world all of its
    workers must ask: each looks at its share of the files, and all find the same.
    """
    worker, size, group = (world.worker, world.size, world.control) if world else (0, 1, None)
    for path in map(Path, gather_json([str(path) for path in checkpoints_in(folder)], group, size)[0]):
        manifest, fault = None, f"checkpoint {path} is of another run"
        if _is_of_run(path, folder):
            try:
                manifest, fault = read_manifest(path, worker, size), ""
            except CheckpointError as found:
                fault = found.what
        faults = gather_json(fault, group, size)
        if manifest is not None and not any(faults):
            return path, manifest
        tell(f"{next(filter(None, faults))}; it is passed over")
    return None


def sweep(run_folder: Path) -> None:
    """Removes what a killed run left half written."""
    for entry in (run_folder / CHECKPOINTS).glob(".step-*.part"):
        shutil.rmtree(entry, ignore_errors=True)


def prune(run_folder: Path, keep: int, good: set[str], spare: Path | None = None) -> None:
    """Removes the run's own checkpoints that are older than the newest good ones, of which it keeps some.

    `good` has the names of those that are known to be good, and gets those that are found to be; one is spared.
    """
    kept = 0
    for path in checkpoints_in(run_folder, own=True):
        if kept >= keep and path != spare:
            doomed = unfinished(path)  # half removed, it must not be taken for one
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            continue
        try:
            if path.name not in good:
                read_manifest(path)
        except CheckpointError:
            continue
        good.add(path.name)
        kept += 1


# Writing


def together(do: Callable[[], Any], group: dist.ProcessGroup | None, size: int) -> list[Any]:
    """What every worker's call gave; where one failed, all do."""
    try:
        told = {"made": do()}
    except Exception as failure:
        told = {"fault": reason(failure)}
    every = gather_json(told, group, size)
    faults = [f"worker {number}: {each['fault']}" for number, each in enumerate(every) if "fault" in each]
    if faults:
        raise CheckpointError(faults[0] if size > 1 else faults[0].partition(": ")[2])
    return [each["made"] for each in every]


def reason(failure: BaseException) -> str:
    """Why a checkpoint could not be written, in a line."""
    if isinstance(failure, StagewrightError):
        return failure.what
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0]}"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes a safetensors file to the disk, and returns its SHA-256."""
    save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, path)
    return _hash_on_disk(path)


def _hash_on_disk(path: Path) -> str:
    """The SHA-256 of a file, once the disk has it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sums_text(hashes: Mapping[str, str]) -> str:
    """What SHA256SUMS says about these files."""
    return "".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes))


def _sync_folder(folder: Path) -> None:
    """Waits until the disk knows the folder's names."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def part_of(worker: int) -> str:
    """The name of the file that a worker writes."""
    return f"part-{worker}.safetensors"


def unfinished(folder: Path) -> Path:
    """Where a checkpoint is while it is being written."""
    return folder.with_name(f".{folder.name}.part")


def write_part(folder: Path, worker: int, tensors: Tensors) -> dict[str, Any]:
    """Writes a worker's part of a checkpoint, and returns what `finish` must know of it."""
    if not tensors:
        return {"hashes": {}, "tensors": {}}
    name = part_of(worker)
    unfinished(folder).mkdir(parents=True, exist_ok=True)
    digest = write_tensors(unfinished(folder) / name, tensors)
    return {"hashes": {name: digest}, "tensors": {key: {"file": name} for key in tensors}}


def finish(folder: Path, about: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> None:
    """Adds the manifest and the hashes to the parts of all workers, and gives the checkpoint its name."""
    part = unfinished(folder)
    part.mkdir(parents=True, exist_ok=True)
    tensors = {key: entry for each in parts for key, entry in each["tensors"].items()}
    hashes = {name: digest for each in parts for name, digest in each["hashes"].items()}
    manifest = {"format": _FORMAT, "version": _VERSION, **about, "tensors": tensors}
    (part / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    hashes[MANIFEST] = _hash_on_disk(part / MANIFEST)
    (part / SUMS).write_text(_sums_text(hashes), encoding="utf-8")
    _hash_on_disk(part / SUMS)
    for entry in part.iterdir():  # of an attempt with more workers
        if _FILE.fullmatch(entry.name) and entry.name not in hashes:
            entry.unlink()
    _sync_folder(part)
    if folder.exists():
        shutil.rmtree(folder)
    part.rename(folder)
    _sync_folder(folder.parent)


# Reading


def _open_plain(path: Path) -> io.BufferedReader:
    """Opens a file that is one: not a link, a pipe or a device, which might never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "it is no plain file", str(path))
    return os.fdopen(handle, "rb")


def _read_plain(path: Path) -> bytes:
    with _open_plain(path) as file:
        return file.read()


class Files(NamedTuple):
    """How the files of a checkpoint are looked at, by their names."""

    read: Callable[[str], bytes]
    digest: Callable[[str], str]


def files_in(folder: Path) -> Files:
    """The files of a checkpoint in a folder of this host."""

    def digest(name: str) -> str:
        with _open_plain(folder / name) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return Files(lambda name: _read_plain(folder / name), digest)


def read_manifest(
    folder: Path | str, worker: int = 0, num_workers: int = 1, files: Files | None = None
) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are as they were written; a CheckpointError names those that are not.

    Of several workers each looks at its share of the files; the checkpoint is good when it is for all of them.
    """
    files = files or files_in(Path(folder))
    try:
        sums, text = files.read(SUMS), files.read(MANIFEST)
        lines = map(_LINE.fullmatch, sums.decode("utf-8", errors="replace").splitlines())
        hashes = {match[2]: match[1] for match in lines if match is not None}
        faults = [] if _sums_text(hashes).encode() == sums else [f"{SUMS} is not as it was written"]
        if hashes.get(MANIFEST) != hashlib.sha256(text).hexdigest():
            faults.append(f"{MANIFEST} is not as it was written")
        shares = sorted(hashes.keys() - {MANIFEST})[worker::num_workers]
        faults += filter(None, (_fault_of(name, hashes[name], files) for name in shares))
        if faults:
            raise CheckpointError(f"checkpoint {folder} is damaged: {', '.join(faults)}")
        return _checked(str(folder), json.loads(text), hashes)
    except OSError as fault:
        raise CheckpointError(f"checkpoint {folder} is torn: {_missing(fault, SUMS)}") from None
    except ValueError as fault:
        raise CheckpointError(f"checkpoint {folder} has a manifest that cannot be read: {fault}") from None


def _fault_of(name: str, digest: str, files: Files) -> str | None:
    """What is wrong with a file of a checkpoint."""
    try:
        return None if files.digest(name) == digest else f"{name} is not as it was written"
    except OSError as fault:
        return _missing(fault, name)


def _missing(fault: OSError, name: str) -> str:
    """Why a file cannot be read, and which."""
    return f"{fault.strerror or 'there is none'} ({Path(str(fault.filename or name)).name})"


def _checked(folder: str, manifest: Any, hashes: Mapping[str, str]) -> dict[str, Any]:
    """The manifest, if it is one that this version reads and names no file but those of its checkpoint."""
    path = f"{folder}/{MANIFEST}"
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is no manifest of a checkpoint")
    if manifest.get("version") not in range(1, _VERSION + 1):
        raise CheckpointError(
            f"checkpoint {folder} has version {manifest.get('version')}: this is written for {_VERSION}"
        )
    tensors = manifest.get("tensors")
    if not isinstance(tensors, dict) or not isinstance(manifest.get("step"), int):
        raise CheckpointError(f"{path} lacks its tensors or its step")
    for key, value in tensors.items():
        name = value.get("file") if isinstance(value, dict) else None
        if not isinstance(name, str) or _FILE.fullmatch(name) is None or name not in hashes:
            raise CheckpointError(f"{path} describes {key} in a way that cannot be")
    return manifest


@contextmanager
def opened(folder: Path, manifest: Mapping[str, Any]) -> Iterator[Callable[[str], Tensor]]:
    """A function from keys to tensors of a checkpoint whose hashes were found good, while the block runs."""
    files: dict[str, Any] = {}
    with ExitStack() as stack:

        def read(key: str) -> Tensor:
            if key not in manifest["tensors"]:
                raise CheckpointError(
                    f"the checkpoint has no {key.removeprefix('model/')}, which a stage here needs",
                    "it is of another model: give the folder of a run of this one",
                )
            name = manifest["tensors"][key]["file"]
            try:
                if name not in files:
                    files[name] = stack.enter_context(safe_open(folder / name, framework="pt"))
                tensor: Tensor = files[name].get_tensor(key)
            except (SafetensorError, OSError) as fault:
                raise CheckpointError(f"checkpoint {folder} cannot be read: {name}: {fault}") from None
            return tensor

        yield read
