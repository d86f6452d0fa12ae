"""Checkpoint files: what torch.distributed.checkpoint plans, written as safetensors, hashed, whole or not at all.

    step-00000300/
        part-0.safetensors …   the tensors that worker 0 … wrote
        manifest.json          which tensor is in which file, and the state that is no tensor
        SHA256SUMS             the hash of every file above, as sha256sum -c reads it

A checkpoint is written into `.step-00000300.part`, brought to the disk, and renamed. It is good when SHA256SUMS is,
byte for byte, what its files come to. Nothing in it is a pickle: JSON and raw numbers only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from stagewright.errors import CheckpointError

FORMAT, VERSION = "stagewright.checkpoint", 1
MANIFEST, SUMS = "manifest.json", "SHA256SUMS"
NAME = re.compile(r"step-(\d{8,18})")
PART = re.compile(r"\.step-\d{8,18}\.part")
FILE = re.compile(r"part-\d{1,6}\.safetensors")
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Number formats and what safetensors calls them."""
OF_NAME = {name: dtype for dtype, name in DTYPES.items()}
CHUNK = 1 << 22


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes a safetensors file to the disk, and returns its SHA-256."""
    flat = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
    header, place = {}, 0
    for key, tensor in flat.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{key} has numbers of type {tensor.dtype}, which a checkpoint cannot hold")
        size = tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + size],
        }
        place += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts: list[bytes | memoryview] = [
        struct.pack("<Q", len(text)),
        text,
        *(raw_bytes(tensor) for tensor in flat.values()),
    ]
    return write_hashed(path, parts)


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's memory as it lies."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else memoryview(b"")


def write_hashed(path: Path, parts: Sequence[bytes | memoryview]) -> str:
    """Writes a file, waits until the disk has it, and returns its SHA-256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in parts:
            for start in range(0, len(part), CHUNK):
                piece = part[start : start + CHUNK]
                digest.update(piece)
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def hash_of(path: Path) -> str:
    """A file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sums_text(hashes: Mapping[str, str]) -> str:
    """What SHA256SUMS says about these files."""
    return "".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes))


def sync_folder(folder: Path) -> None:
    """Waits until the disk knows the folder's names."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class PartWriter(StorageWriter):
    """Writes this worker's part; the first worker adds the manifest and the hashes and gives the folder its name."""

    def __init__(self, folder: Path, worker: int, about: Mapping[str, Any]) -> None:
        self.folder, self.worker, self.about = folder, worker, about
        self.part = folder.with_name(f".{folder.name}.part")

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.part.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        name = f"part-{self.worker}.safetensors"
        given: Future[list[WriteResult]] = Future()
        if not tensors:
            given.set_result([])
            return given
        digest = write_tensors(self.part / name, tensors)  # type: ignore[arg-type]
        given.set_result(
            [WriteResult(item.index, item.tensor_storage_size() or 0, (name, digest)) for item in plan.items]
        )
        return given

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {result.index.fqn: result.storage_data for part in results for result in part}
        tensors = {key: describe(metadata.state_dict_metadata[key], name) for key, (name, _) in written.items()}
        manifest = {"format": FORMAT, "version": VERSION, **self.about, "tensors": tensors}
        hashes = dict(written.values())
        hashes[MANIFEST] = write_hashed(self.part / MANIFEST, [json.dumps(manifest, indent=1).encode()])
        write_hashed(self.part / SUMS, [sums_text(hashes).encode()])
        sync_folder(self.part)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.part.rename(self.folder)
        sync_folder(self.folder.parent)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def describe(known: Any, file: str) -> dict[str, Any]:
    """A tensor's line in the manifest."""
    return {"file": file, "dtype": DTYPES[known.properties.dtype], "shape": list(known.size)}


class PartReader(StorageReader):
    """Reads the tensors of a checkpoint whose hashes were found good."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder, self.tensors = folder, manifest["tensors"]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        known = {key: stored(value["dtype"], value["shape"]) for key, value in self.tensors.items()}
        return Metadata(state_dict_metadata=known, storage_data={})  # type: ignore[arg-type]

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self.tensors[item.storage_index.fqn]["file"], []).append(item)
        for name, items in by_file.items():
            with safe_open(self.folder / name, framework="pt") as file:
                for item in items:
                    planner.resolve_tensor(item).copy_(file.get_tensor(item.storage_index.fqn))
        given: Future[None] = Future()
        given.set_result(None)
        return given

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def stored(dtype: str, shape: Sequence[int]) -> TensorStorageMetadata:
    """What torch.distributed.checkpoint wants to know of a tensor that lies in one piece."""
    size = torch.Size(shape)
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=OF_NAME[dtype]), size, [whole])


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is as it was written; a CheckpointError says what is not."""
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.name != SUMS)
        sums = (folder / SUMS).read_bytes()
        if sums_text({name: hash_of(folder / name) for name in names}).encode() != sums:
            raise CheckpointError(f"checkpoint {folder} is damaged: {changed(folder, names, sums)}")
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except OSError as fault:
        raise CheckpointError(
            f"checkpoint {folder} is torn: {fault.strerror} ({Path(fault.filename or '').name})"
        ) from None
    except ValueError as fault:
        raise CheckpointError(f"checkpoint {folder} has a manifest that cannot be read: {fault}") from None
    return checked(folder, manifest)


def changed(folder: Path, names: Sequence[str], sums: bytes) -> str:
    """Which file is not as SHA256SUMS says."""
    listed = set(sums.decode(errors="replace").splitlines())
    wrong = [name for name in names if f"{hash_of(folder / name)}  {name}" not in listed]
    return f"{wrong[0]} is not as it was written" if wrong else f"{SUMS} does not fit its files"


def checked(folder: Path, manifest: Any) -> dict[str, Any]:
    """The manifest, if it is one that this version reads and names no file outside its folder."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder / MANIFEST} is no manifest of a checkpoint")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint {folder} has version {manifest.get('version')}: this is written for {VERSION}"
        )
    tensors = manifest.get("tensors")
    if not isinstance(tensors, dict) or not isinstance(manifest.get("step"), int):
        raise CheckpointError(f"{folder / MANIFEST} lacks its tensors or its step")
    for key, value in tensors.items():
        if not is_entry(value):
            raise CheckpointError(f"{folder / MANIFEST} describes {key} in a way that cannot be")
    return manifest


def is_entry(value: Any) -> bool:
    """Whether this is a tensor's line in a manifest."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("file"), str)
        and FILE.fullmatch(value["file"]) is not None
        and value.get("dtype") in OF_NAME
        and isinstance(value.get("shape"), list)
        and all(isinstance(size, int) and size >= 0 for size in value["shape"])
    )
