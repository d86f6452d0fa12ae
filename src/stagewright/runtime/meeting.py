"""Where the workers of one host meet: a store that listens on the loopback interface only.

torch's own rendezvous listens on every interface of the host; a run on one host has no business there.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(minutes=5)


class Loopback(RendezvousHandler):
    """One agent alone with its workers; every start of the workers has a store of its own."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        # Workers that are started again find nothing of what those before them left.
        listener = socket.create_server((LOOPBACK, 0), backlog=1024)
        port = listener.getsockname()[1]
        store = TCPStore(
            LOOPBACK, port, is_master=True, timeout=TIMEOUT, wait_for_workers=False, multi_tenant=True,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        return RendezvousInfo(PrefixStore(self._run_id, store), 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return None

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
