"""What the kernel knows of this process's connections to other hosts: on which of them it sends the same again."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from stagewright.runtime.launch.meeting import Place


def bad_links(places: Sequence[Place], worker: int) -> list[str]:
    """The other hosts, by name and address, that have not confirmed what they were sent several times in a row."""
    others = {place.address: place for place in places if place.host != places[worker].host and place.address}
    # The same was sent several times in a row: once may be chance.
    found = dict.fromkeys(address for address, known in _connections() if address in others and known[2] > 1)
    return [f"{others[address].name} ({address})" for address in found]


def sending_s(places: Sequence[Place], worker: int) -> dict[str, float]:
    """For each other host, by address, the seconds that something was on its way to it and not yet confirmed."""
    others = {place.address for place in places if place.host != places[worker].host and place.address}
    found = dict[str, float]()
    for address, known in _connections():
        if address in others and len(known) >= 184:
            busy, full = struct.unpack_from("=2Q", known, 168)  # in all, and while the other side took nothing
            found[address] = found.get(address, 0.0) + (busy - full) / 1e6
    return found


def _connections() -> Iterator[tuple[str, bytes]]:
    """To which address each of this process's connections goes, and what the kernel knows of it (struct tcp_info)."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError, ValueError):
            own = os.dup(int(entry.name))
            try:
                connection = socket.socket(fileno=own)
            except OSError:  # it is none
                os.close(own)
                continue
            with connection:
                address = str(connection.getpeername()[0]).removeprefix("::ffff:")
                yield address, connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
