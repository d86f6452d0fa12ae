"""Where workers meet: each learns who is there, and where, before any of them opens a connection to another.

    worker 1  ── hello: its token and its place ──▶  store
    worker 0  ── welcome: a name for this meeting, all tokens and places ──▶  store
    worker 1  ── here, in this meeting ──▶  store
    worker 0  ── go ──▶  store                                      when all are in one meeting

A store may still hold what workers that ran before left in it. Nobody goes by a welcome that does not have its own
token, and worker 0 calls a new meeting when a token changes.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from stagewright.errors import RunError
from stagewright.runtime.launch.environment import RESTARTED, STORE

_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that names the interface over which gloo connects workers."""


class Place(NamedTuple):
    """Where a worker runs, as it tells the others."""

    host: str
    """The same for workers of one host, and for no others."""
    name: str
    address: str
    """Its own address towards the one where all meet; empty on one host."""
    was_restarted: bool
    """Whether its launcher has started workers before."""

    @classmethod
    def here(cls) -> Place:
        """Where this worker runs."""
        again = RESTARTED in os.environ or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        name, network = socket.gethostname(), ""
        with suppress(OSError):  # where there are network namespaces
            network = os.readlink("/proc/self/ns/net")
        host = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or f"{name} {network}"
        address = "" if STORE in os.environ else _address_towards(os.environ.get("MASTER_ADDR", ""))
        return cls(host, name, address, again)


def meet(rank: int, size: int, timeout_s: float) -> tuple[Store, list[Place]]:
    """A store that this meeting of the workers has for itself, and where each of them is."""
    store, own = _open_store(rank, size, timeout_s), Place.here()
    token, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    store.set(f"hello/{rank}", json.dumps([token, own]))
    called, meeting = dict[int, Any](), ""
    while time.monotonic() < deadline:
        if rank == 0:
            said = _hellos(store, size)
            if len(said) == size and said != called:
                called, meeting = said, uuid.uuid4().hex
                store.set("welcome", json.dumps([meeting, list(said.values())]))
        welcome = _read(store, "welcome")
        if welcome is not None and token in (said[0] for said in welcome[1]):
            name = welcome[0]
            store.set(f"{name}/here/{rank}", "")
            if rank == 0 and name == meeting and store.check([f"{name}/here/{other}" for other in range(size)]):
                store.set(f"{name}/go", "")
            if store.check([f"{name}/go"]):
                return PrefixStore(name, store), [Place(*place) for _, place in welcome[1]]
        time.sleep(0.02)
    missing = ", ".join(str(number) for number in range(size) if number not in _hellos(store, size))
    who = f"worker {missing}" if missing else "a worker"
    raise RunError(f"{who} did not start within {timeout_s:g} s", "give more with --start-timeout")


def _open_store(rank: int, size: int, timeout_s: float) -> Store:
    """The store of this host's agent, or the one that torchrun and the like name in the environment."""
    if STORE in os.environ:
        return FileStore(os.environ[STORE], size)
    store: Store = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout_s)))[0]
    return PrefixStore("stagewright", store)


def _hellos(store: Store, size: int) -> dict[int, Any]:
    """What each worker that is there has said."""
    found = {number: _read(store, f"hello/{number}") for number in range(size)}
    return {number: said for number, said in found.items() if said is not None}


def _read(store: Store, key: str) -> Any:
    """The value of a key, if there is one."""
    return json.loads(store.get(key)) if store.check([key]) else None


def _address_towards(host: str) -> str:
    """This host's own address on the way to another one; nothing is sent. Empty where there is no way."""
    with suppress(OSError):
        family, kind, protocol, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return ""


def choose_interface(places: list[Place], rank: int) -> None:
    """Names the interface that leads to the other hosts, unless the user did.

    By itself gloo takes the address that this host's own name resolves to, which on Debian is one of loopback.
    """
    others = [place.address for place in places if place.host != places[rank].host]
    outside = [address for address in others if address and not address.startswith("127.")]
    own = _address_towards(outside[0]) if outside else places[rank].address if others else "127.0.0.1"
    if _INTERFACE not in os.environ and (name := _interface_with(own)) is not None:
        os.environ[_INTERFACE] = name


def lost_hosts(places: Sequence[Place], rank: int, limit_s: float) -> list[str]:
    """The other hosts that do not answer within a while, by name and address; a refusal is an answer."""
    others = {place.address: place for place in places if place.host != places[rank].host and place.address}
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        there = pool.map(lambda address: _answers(address, limit_s), others)
        return [f"{place.name} ({place.address})" for place, is_there in zip(others.values(), there) if not is_there]


def _answers(address: str, limit_s: float) -> bool:
    """Whether a host is there: it says at once that nobody listens."""
    try:
        socket.create_connection((address, 9), timeout=limit_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def _interface_with(address: str) -> str | None:
    """The interface that has an address of IPv4."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
