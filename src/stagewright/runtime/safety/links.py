"""What the kernel knows of this process's connections to other hosts: on which of them it sends the same again."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from stagewright.runtime.launch.meeting import Place


def bad_links(places: Sequence[Place], worker: int) -> list[str]:
    """The other hosts, by name and address, that have not confirmed what they were sent several times in a row."""
    others = {place.address: place for place in places if place.host != places[worker].host and place.address}
    found = dict[str, None]()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError, ValueError):
            address, times = _sent_again(int(entry.name))
            if address in others and times > 1:  # once may be chance
                found[address] = None
    return [f"{others[address].name} ({address})" for address in found]


def _sent_again(file: int) -> tuple[str, int]:
    """To which address a connection goes, and how many times in a row it has sent the same."""
    own = os.dup(file)
    try:
        connection = socket.socket(fileno=own)
    except OSError:  # it is none
        os.close(own)
        raise
    with connection:
        address = str(connection.getpeername()[0]).removeprefix("::ffff:")
        return address, connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[2]
