"""Checkpoints beside the run's folder, which outlive its disk: in any store that fsspec opens, or a mounted folder.

    worker 0   … U [copy] F B U       F B U             training goes on
    thread               [ write ]                      into the run's folder, whole or not at all
    copier                        [ parts … SHA256SUMS ]    to s3://bucket/run/step-00000300/

Stores rename nothing. So SHA256SUMS is written last, when all other files have been seen to be there, and whoever reads
a checkpoint goes by it: one without it, or with a file that is not as listed, is none.
"""

from __future__ import annotations

import hashlib
import json
import queue
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem

from stagewright.errors import CheckpointError, UsageError
from stagewright.runtime.checkpoint.storage import (
    MANIFEST,
    STEP,
    SUMS,
    Files,
    files_in,
    part_of,
    path_of,
    read_manifest,
    reason,
    together,
    unfinished,
)
from stagewright.runtime.run_folder import CHECKPOINTS, read_identity
from stagewright.runtime.world import World, gather_json

_T = TypeVar("_T")


def is_url(text: str | None) -> bool:
    """Whether a text names a place in a store, and no path."""
    return text is not None and "://" in text


@dataclass(frozen=True)
class Store:
    """The checkpoints under a URL or in a folder; each request is made again when it fails."""

    url: str
    system: Any
    root: str
    only: str | None = None
    """The one checkpoint that the URL names."""

    @classmethod
    def open(cls, url: str) -> Store:
        """The store of a URL, or of the folder of a run or of checkpoints; of one checkpoint just that."""
        if not is_url(url):
            path = Path(url).absolute()
            url = str(path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path)
        try:
            # Others write there meanwhile, and threads need clients of their own.
            system, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError) as fault:
            told = "pip install 'stagewright[s3]'" if url.startswith("s3:") else "see the list of fsspec's file systems"
            raise UsageError(f"{url} cannot be opened: {fault}", told) from None
        folder, _, name = root.rstrip("/").rpartition("/")
        if STEP.fullmatch(name):
            return cls(url.rstrip("/").removesuffix(f"/{name}"), system, folder, name)
        return cls(url.rstrip("/"), system, root.rstrip("/"))

    def _try(self, what: str, do: Callable[[], _T]) -> _T:
        """What a request gives; one that fails is made again, unless that cannot help."""
        for wait_s in (0.05, 0.2, 1.0, 5.0, None):
            try:
                return do()
            except (FileNotFoundError, NotImplementedError):
                raise
            except Exception as fault:  # each store has its own
                if wait_s is None or isinstance(fault, PermissionError):
                    raise CheckpointError(f"{what}: {reason(fault)}") from None
                time.sleep(wait_s)
        raise AssertionError

    def names(self) -> list[str]:
        """The checkpoints, newest first, whole or not."""
        if self.only is not None:
            return [self.only]
        with suppress(FileNotFoundError):
            entries = self._try(f"{self.url} cannot be listed", lambda: self.system.ls(self.root, detail=False))
            found = {str(entry).rstrip("/").rpartition("/")[2] for entry in entries}
            return sorted(filter(STEP.fullmatch, found), key=lambda name: int(name.removeprefix("step-")), reverse=True)
        return []

    def sizes(self, name: str) -> dict[str, int]:
        """The files of a checkpoint with their sizes."""
        folder = f"{self.root}/{name}"  # its `find` would leave out what it cannot list
        with suppress(FileNotFoundError):
            entries = self._try(f"{self.url}/{name} cannot be listed", lambda: self.system.ls(folder, detail=True))
            return {str(entry["name"]).rpartition("/")[2]: int(entry["size"] or 0) for entry in entries}
        return {}

    def _files(self, name: str) -> Files:
        """How the files of a checkpoint are looked at; those of this host only where they are plain ones."""
        folder = f"{self.root}/{name}"
        if type(self.system) is LocalFileSystem:
            return files_in(Path(folder))

        def digest(path: str) -> str:
            with self.system.open(path, "rb") as opened:
                return hashlib.file_digest(opened, "sha256").hexdigest()

        def told(do: Callable[[str], _T]) -> Callable[[str], _T]:
            return lambda file: self._try(f"{self.url}/{name}/{file} cannot be read", lambda: do(f"{folder}/{file}"))

        return Files(told(lambda path: bytes(self.system.cat_file(path))), told(digest))

    def read(self, name: str, file: str) -> bytes:
        """A small file of a checkpoint."""
        return self._files(name).read(file)

    def manifest(self, name: str) -> dict[str, Any]:
        """What a checkpoint's manifest says, looked at or not; nothing where there is none."""
        with suppress(FileNotFoundError, ValueError):
            found = json.loads(self.read(name, MANIFEST))
            return found if isinstance(found, dict) else {}
        return {}

    def check(self, name: str) -> dict[str, Any]:
        """The manifest of a checkpoint that is good to the last byte; a CheckpointError names what is not."""
        return read_manifest(f"{self.url}/{name}", files=self._files(name))

    def is_good(self, name: str) -> bool:
        """Whether a checkpoint is good to the last byte."""
        with suppress(CheckpointError):
            return bool(self.check(name))
        return False

    def lacks(self, name: str) -> list[str]:
        """The files that a checkpoint should have and has not, looked at by name."""
        there = self.sizes(name)
        if SUMS not in there:
            return [SUMS]
        lines = self.read(name, SUMS).decode(errors="replace").splitlines()
        return [file for line in lines if (file := line.rpartition(" ")[2]) not in there]

    def check_writable(self) -> None:
        """Refuses a store to which nothing can be written."""
        probe = f"{self.root}/.probe-{uuid.uuid4().hex}"
        try:
            self._make(self.root)
            self._try(f"{self.url} cannot be written to", lambda: self.system.pipe_file(probe, b"probe"))
            self._try(f"{self.url} cannot be written to", lambda: self.system.rm_file(probe))
        except (CheckpointError, OSError) as fault:
            raise UsageError(reason(fault), "look at its name and at who may write there") from None

    def _make(self, folder: str) -> None:
        """Makes a folder, where a store has such."""
        with suppress(NotImplementedError):
            self._try(f"{self.url} cannot be written to", lambda: self.system.makedirs(folder, exist_ok=True))

    def has(self, path: Path) -> bool:
        """Whether a finished checkpoint of this host is there already."""
        with suppress(FileNotFoundError):
            return self.read(path.name, SUMS) == (path / SUMS).read_bytes()
        return False

    def open_for(self, path: Path) -> None:
        """Makes the folder for a copy of a checkpoint; one that is there under its name is none from now on."""
        self._make(f"{self.root}/{path.name}")
        with suppress(FileNotFoundError):
            sums = f"{self.root}/{path.name}/{SUMS}"
            self._try(f"{self.url}/{path.name} cannot be written", lambda: self.system.rm_file(sums))

    def send(self, path: Path, file: str) -> None:
        """Copies one file of a checkpoint there."""
        to = f"{self.root}/{path.name}/{file}"
        self._try(
            f"{self.url}/{path.name}/{file} cannot be written", lambda: self.system.put_file(str(path / file), to)
        )

    def close(self, path: Path) -> None:
        """Makes a copy one, once all of its files are there."""
        self.send(path, MANIFEST)
        there, here = self.sizes(path.name), {each.name: each.stat().st_size for each in path.iterdir()}
        lost = [file for file, size in here.items() if file != SUMS and there.get(file) != size]
        if lost:
            raise CheckpointError(f"{self.url}/{path.name} has lost {', '.join(sorted(lost))}")
        self.send(path, SUMS)
        if self.read(path.name, SUMS) != (path / SUMS).read_bytes():
            raise CheckpointError(f"{self.url}/{path.name}/{SUMS} is not as it was written")

    def bring(self, name: str, into: Path, worker: int, num_workers: int) -> None:
        """Copies a worker's share of a checkpoint's files into a folder of this host."""
        into.mkdir(parents=True, exist_ok=True)
        for file in sorted(self.sizes(name))[worker::num_workers]:
            if re.fullmatch(r"[\w.-]+", file):
                path = f"{self.root}/{name}/{file}"
                self._try(
                    f"{self.url}/{name}/{file} cannot be read",
                    lambda path=path, file=file: self.system.get_file(path, str(into / file)),  # type: ignore[misc]
                )

    def remove(self, name: str) -> None:
        """Removes a checkpoint; half removed it is none."""
        for path in (f"{self.root}/{name}/{SUMS}", f"{self.root}/{name}"):
            with suppress(FileNotFoundError):
                self._try(
                    f"{self.url}/{name} cannot be removed",
                    lambda path=path: self.system.rm(path, recursive=True),  # type: ignore[misc]
                )

    def clear(self) -> None:
        """Removes all checkpoints."""
        for name in self.names():
            self.remove(name)

    def run(self) -> str | None:
        """Whose checkpoints these are: of the run of the folder, or that of the newest one here."""
        known = read_identity(Path(self.root).parent) if type(self.system) is LocalFileSystem else None
        newest = next(filter(None, map(self.manifest, self.names())), {})
        return (known or {}).get("id") or newest.get("run")

    def prune(self, keep: int, run: str | None, good: Callable[[str], bool]) -> list[str]:
        """Removes a run's checkpoints that are older than the newest good ones, of which it keeps some; their names.

        What `good` does not know to be good is neither counted nor, before enough are, removed.
        """
        kept, removed = 0, []
        for name in self.names():
            if self.manifest(name).get("run", run) not in (run, None):
                continue
            if kept >= keep:
                self.remove(name)
                removed.append(name)
            else:
                kept += good(name)
        return removed


def check_stores(checkpoints: str | None, resume: str | None) -> None:
    """Refuses a store to which nothing can be written, and to resume from one that has no checkpoint."""
    if checkpoints is not None:
        Store.open(checkpoints).check_writable()
    if is_url(resume):
        store = Store.open(str(resume))
        try:
            names = store.names() if store.only is None else list(store.sizes(store.only))
        except CheckpointError as fault:
            raise UsageError(f"--resume {resume}: {fault.what}", "look at its name and at who may read it") from None
        if not names:
            raise UsageError(f"--resume {resume}: there is no checkpoint", "use auto, or a run's or checkpoint's URL")


def run_at(url: str, folder: str | Path | None, *, resume: str | None, goes_on: bool) -> str | None:
    """The id of the run whose checkpoints a store has; refuses one that has those of another run than is gone on with.

    A run whose folder was lost goes on with its id, in another folder.
    """
    store = Store.open(url)
    names = store.names()
    newest = next(filter(None, map(store.manifest, names)), None)
    if newest is None:
        return None
    known = (read_identity(Path(folder)) or {}).get("id") if folder is not None else None
    again = Store.open(str(resume)) if is_url(resume) else None
    is_same = goes_on or resume == "auto" or (again is not None and again.root == store.root)
    if not is_same or known not in (None, newest.get("run")):
        raise UsageError(
            f"--checkpoints {url} has those of another run, of {newest.get('model')}",
            "name another place, go on with that run by --resume auto, or remove its checkpoints by --overwrite",
        )
    if again is not None and again.only is not None and again.only < names[0]:
        raise UsageError(
            f"--checkpoints {url} has later ones than {again.only}: {names[0]}",
            "name another place, or remove the later ones",
        )
    return str(newest["run"]) if newest.get("run") else None


def fetch(
    store: Store, folder: Path, run: str, after: int, tell: Callable[[str], None], world: World
) -> tuple[Path, Mapping[str, Any]] | None:
    """The newest good checkpoint of a store with more than so many steps, brought to this run's folder by all workers.

    One of this run takes its place there; that of another is in a folder that is swept with the unfinished ones.
    """
    group, worker, size = world.control, world.worker, world.size
    for name in gather_json(store.names() if worker == 0 else [], group, size)[0]:
        step = int(name.removeprefix("step-"))
        if step <= after:
            return None
        path = path_of(folder, step)
        try:
            together(lambda path=path, name=name: store.bring(name, unfinished(path), worker, size), group, size)  # type: ignore[misc]
            (manifest, *_) = together(lambda path=path: read_manifest(unfinished(path), worker, size), group, size)  # type: ignore[misc]
        except CheckpointError as fault:
            tell(f"{fault.what.replace(str(unfinished(path)), f'{store.url}/{name}')}; it is passed over")
            gather_json(None, group, size)
            if worker == 0:
                shutil.rmtree(unfinished(path), ignore_errors=True)
            continue
        if manifest.get("run") != run:
            return unfinished(path), manifest
        together(lambda path=path: _take_place(path, worker), group, size)  # type: ignore[misc]
        return path, manifest
    return None


def _take_place(path: Path, worker: int) -> None:
    """Gives a checkpoint that was brought here its name; one that is there is not good."""
    if worker == 0:
        shutil.rmtree(path, ignore_errors=True)
        unfinished(path).rename(path)


class Copier:
    """Copies finished checkpoints to a store while training goes on, one at a time. All workers must make one.

    Those that are saved while one is on its way stay in the run's folder alone; the last one is always copied.
    """

    def __init__(self, store: Store, world: World, *, keep: int, run: str | None, limit_s: float) -> None:
        self.store, self._world, self._keep, self._run_id, self._limit_s = store, world, keep, run, limit_s
        wait = max(world.timeout, timedelta(seconds=limit_s))
        self._group = dist.new_group(timeout=wait, backend="gloo") if world.size > 1 else None
        self._good: set[str] = set()
        self._last: Path | None = None
        self._thread: threading.Thread | None = None
        self.fault: str | None = None
        """Why the last one could not be copied."""
        self.news: queue.SimpleQueue[str] = queue.SimpleQueue()

    @property
    def under_way(self) -> Path | None:
        """The checkpoint that is being copied."""
        return self._last if self._thread is not None and self._thread.is_alive() else None

    def begin(self, path: Path, *, may_prune: bool) -> None:
        """Copies a checkpoint, in a thread. All workers must begin with the same."""
        self._last = path
        self._thread = threading.Thread(target=self._run, args=(path, may_prune), name="copier", daemon=True)
        self._thread.start()

    def finish(self, path: Path) -> None:
        """Waits until a checkpoint is copied, which is the last one."""
        for _ in range(2):
            if self._thread is not None:
                self._thread.join(self._limit_s)
            if self.under_way is not None:
                self.fault = f"step {path.name[5:]} was not copied to {self.store.url} within {self._limit_s:g} s"
            if self.under_way is not None or self._last == path:
                return
            self.begin(path, may_prune=True)

    def _run(self, path: Path, may_prune: bool) -> None:
        """Copies a checkpoint, and tells what became of it."""
        started, step, to = time.perf_counter(), int(path.name.removeprefix("step-")), self.store.url
        try:
            self._copy(path, may_prune)
            self.fault = None
            self.news.put(f"step {step} copied to {to} in {time.perf_counter() - started:.2f} s")
        except BaseException as failure:  # the run goes on, and has it in its folder
            self.fault = f"step {step} could not be copied: {reason(failure)}"
            self.news.put(self.fault)

    def _copy(self, path: Path, may_prune: bool) -> None:
        store, group, size, is_first = self.store, self._group, self._world.size, self._world.worker == 0

        def send_own() -> None:
            if (path / part_of(self._world.worker)).exists():
                store.send(path, part_of(self._world.worker))

        def end() -> None:
            if is_first:
                store.close(path)
                self._good.add(path.name)
                with suppress(CheckpointError):  # what is too much is removed with the next one
                    if may_prune:
                        store.prune(self._keep, self._run_id, lambda name: name in self._good)

        if together(lambda: is_first and store.has(path), group, size)[0]:
            return
        together(lambda: store.open_for(path) if is_first else None, group, size)
        together(send_own, group, size)
        together(end, group, size)
