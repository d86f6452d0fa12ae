"""Checkpoint files: each worker's tensors as safetensors, hashed, whole or not at all.

    step-00000300/
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
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stagewright.errors import CheckpointError

Tensors = dict[str, Tensor]
_FORMAT, _VERSION = "stagewright.checkpoint", 2
MANIFEST, SUMS = "manifest.json", "SHA256SUMS"
NAME = re.compile(r"step-(\d{8,18})")
PART = re.compile(r"\.step-\d{8,18}\.part")
_FILE = re.compile(r"part-\d{1,6}\.safetensors")
_LINE = re.compile(rf"([0-9a-f]{{64}})  ({re.escape(MANIFEST)}|{_FILE.pattern})")
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Number formats and what safetensors calls them."""
_OF_NAME = {name: dtype for dtype, name in _DTYPES.items()}


# Writing


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes a safetensors file to the disk, and returns its SHA-256."""
    flat = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
    header, place = {}, 0
    for key, tensor in flat.items():
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"{key} has numbers of type {tensor.dtype}, which a checkpoint cannot hold")
        size = tensor.numel() * tensor.element_size()
        header[key] = {**_described(tensor), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts: list[bytes | memoryview] = [
        struct.pack("<Q", len(text)),
        text,
        *(_raw_bytes(tensor) for tensor in flat.values()),
    ]
    return write_hashed(path, parts)


def _described(tensor: Tensor) -> dict[str, Any]:
    """A tensor's number format and shape."""
    return {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape)}


def _raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's memory as it lies."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else memoryview(b"")


def write_hashed(path: Path, parts: Sequence[bytes | memoryview]) -> str:
    """Writes a file, waits until the disk has it, and returns its SHA-256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


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


def unfinished(folder: Path) -> Path:
    """Where a checkpoint is while it is being written."""
    return folder.with_name(f".{folder.name}.part")


def write_part(folder: Path, worker: int, tensors: Tensors) -> dict[str, Any]:
    """Writes a worker's part of a checkpoint, and returns what `finish` must know of it."""
    if not tensors:
        return {"hashes": {}, "tensors": {}}
    name = f"part-{worker}.safetensors"
    unfinished(folder).mkdir(parents=True, exist_ok=True)
    digest = write_tensors(unfinished(folder) / name, tensors)
    known = {key: {"file": name, **_described(tensor)} for key, tensor in tensors.items()}
    return {"hashes": {name: digest}, "tensors": known}


def finish(folder: Path, about: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> None:
    """Adds the manifest and the hashes to the parts of all workers, and gives the checkpoint its name."""
    part = unfinished(folder)
    part.mkdir(parents=True, exist_ok=True)
    tensors = {key: entry for each in parts for key, entry in each["tensors"].items()}
    hashes = {name: digest for each in parts for name, digest in each["hashes"].items()}
    manifest = {"format": _FORMAT, "version": _VERSION, **about, "tensors": tensors}
    hashes[MANIFEST] = write_hashed(part / MANIFEST, [json.dumps(manifest, indent=1).encode()])
    write_hashed(part / SUMS, [_sums_text(hashes).encode()])
    for entry in part.iterdir():  # of an attempt with more workers
        if _FILE.fullmatch(entry.name) and entry.name not in hashes:
            entry.unlink()
    _sync_folder(part)
    if folder.exists():
        shutil.rmtree(folder)
    part.rename(folder)
    _sync_folder(folder.parent)


# Reading


def open_plain(path: Path) -> io.BufferedReader:
    """Opens a file that is one: not a link, a pipe or a device, which might never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "it is no plain file", str(path))
    return os.fdopen(handle, "rb")


def _hash_of(path: Path) -> str:
    """A file's SHA-256."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path, worker: int = 0, num_workers: int = 1) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are as they were written; a CheckpointError says what is not.

    Of several workers each looks at its share of the files; the checkpoint is good when it is for all of them.
    """
    try:
        with open_plain(folder / SUMS) as file:
            hashes = _listed(folder, file.read())
        with open_plain(folder / MANIFEST) as file:
            text = file.read()
        _check_hash(folder, MANIFEST, hashlib.sha256(text).hexdigest(), hashes)
        manifest = _checked(folder, json.loads(text), hashes)
        for name in sorted(hashes)[worker::num_workers]:
            _check_hash(folder, name, _hash_of(folder / name), hashes)
    except OSError as fault:
        why = f"{fault.strerror} ({Path(fault.filename or '').name})"
        raise CheckpointError(f"checkpoint {folder} is torn: {why}") from None
    except ValueError as fault:
        raise CheckpointError(f"checkpoint {folder} has a manifest that cannot be read: {fault}") from None
    return manifest


def _listed(folder: Path, sums: bytes) -> dict[str, str]:
    """For each file of a checkpoint its hash, as SHA256SUMS lists them."""
    found = [_LINE.fullmatch(line) for line in sums.decode("utf-8", errors="replace").splitlines()]
    hashes = {match[2]: match[1] for match in found if match is not None}
    if _sums_text(hashes).encode() != sums:
        raise CheckpointError(f"checkpoint {folder} is damaged: {SUMS} is not as it was written")
    return hashes


def _check_hash(folder: Path, name: str, digest: str, hashes: Mapping[str, str]) -> None:
    """Refuses a file whose hash is not the one that is listed."""
    if hashes.get(name) != digest:
        raise CheckpointError(f"checkpoint {folder} is damaged: {name} is not as it was written")


def _checked(folder: Path, manifest: Any, files: Iterable[str]) -> dict[str, Any]:
    """The manifest, if it is one that this version reads and names no file but those of its checkpoint."""
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise CheckpointError(f"{folder / MANIFEST} is no manifest of a checkpoint")
    if manifest.get("version") not in range(1, _VERSION + 1):
        raise CheckpointError(
            f"checkpoint {folder} has version {manifest.get('version')}: this is written for {_VERSION}"
        )
    tensors = manifest.get("tensors")
    if not isinstance(tensors, dict) or not isinstance(manifest.get("step"), int):
        raise CheckpointError(f"{folder / MANIFEST} lacks its tensors or its step")
    known = set(files)
    for key, value in tensors.items():
        if not _is_entry(value) or value["file"] not in known:
            raise CheckpointError(f"{folder / MANIFEST} describes {key} in a way that cannot be")
    return manifest


def _is_entry(value: Any) -> bool:
    """Whether this is a tensor's line in a manifest."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("file"), str)
        and _FILE.fullmatch(value["file"]) is not None
        and value.get("dtype") in _OF_NAME
        and isinstance(value.get("shape"), list)
        and all(isinstance(size, int) and size >= 0 for size in value["shape"])
    )


def read_tensors(folder: Path, manifest: Mapping[str, Any], keys: Iterable[str]) -> Tensors:
    """Some tensors of a checkpoint whose hashes were found good."""
    by_file: dict[str, list[str]] = {}
    for key in keys:
        by_file.setdefault(manifest["tensors"][key]["file"], []).append(key)
    found: Tensors = {}
    for name, inside in by_file.items():
        try:
            with safe_open(folder / name, framework="pt") as file:
                found.update({key: file.get_tensor(key) for key in inside})
        except (SafetensorError, OSError) as fault:
            raise CheckpointError(f"checkpoint {folder} cannot be read: {name}: {fault}") from None
    return found
