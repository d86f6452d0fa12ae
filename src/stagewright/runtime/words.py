"""What workers tell one another over the store, signed with the run's secret.

The store of torchrun takes and gives anything to anyone who reaches its port. Words that the run's own workers did not
sign are no words.
"""

from __future__ import annotations

import hashlib
import hmac

from torch.distributed.distributed_c10d import Store


class Words:
    """Reads and writes signed words under keys."""

    def __init__(self, store: Store, secret: bytes) -> None:
        self._store, self._secret = store, secret

    def put(self, key: str, text: str) -> None:
        """Leaves a word under a key."""
        self._store.set(key, f"{self._sign(key, text)} {text}")

    def get(self, key: str) -> str | None:
        """The word under a key; None where there is none that this run's workers left."""
        if not self._store.check([key]):
            return None
        sign, _, text = self._store.get(key).decode("utf-8", errors="replace").partition(" ")
        return text if hmac.compare_digest(sign.encode(), self._sign(key, text).encode()) else None

    def _sign(self, key: str, text: str) -> str:
        return hmac.new(self._secret, f"{key} {text}".encode(), hashlib.sha256).hexdigest()
