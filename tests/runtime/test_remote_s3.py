"""The same with s3fs against a real HTTP server that loses requests: `benchmarks/stores.py` in small."""

from __future__ import annotations

import random

import pytest


@pytest.mark.timeout(300)
def test_no_torn_copy_is_taken_from_an_s3_that_loses_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'stagewright[s3]'")
    pytest.importorskip("moto.server", reason="moto is not installed: pip install 'moto[server]'")
    from benchmarks import stores

    for name, value in {**stores.ACCOUNT, "AWS_ENDPOINT_URL": ""}.items():
        monkeypatch.setenv(name, value)
    with stores.store(0.2, seed=1) as addresses:
        told, faults = stores.copy_rounds(6, *addresses, random.Random(1))
    assert faults == []
    assert "1 taken again, none torn" in told
