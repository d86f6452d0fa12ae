"""What the tests of the command share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stagewright.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process: its status, what it printed, and what it said on stderr."""

    def ran(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return ran
