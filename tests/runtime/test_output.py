"""What workers print is kept, worker by worker, with their names."""

from __future__ import annotations

from pathlib import Path

from stagewright.runtime.launch import collect_output


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8", errors="surrogateescape"))


def test_every_line_bears_its_workers_name(tmp_path: Path) -> None:
    write(tmp_path / "run_a" / "attempt_0" / "0" / "stdout.log", "hello\nthere\n")
    write(tmp_path / "run_a" / "attempt_0" / "0" / "stderr.log", "a warning")
    write(tmp_path / "run_a" / "attempt_1" / "0" / "stdout.log", "again\n")
    write(tmp_path / "run_a" / "attempt_0" / "11" / "stdout.log", "")
    write(tmp_path / "run_a" / "attempt_0" / "1" / "stdout.log", "no \udcff text\n")
    for _ in range(2):
        collect_output(tmp_path)
        said = (tmp_path / "worker-0.log").read_text().splitlines()
        assert said == ["worker 0 │ hello", "worker 0 │ there", "worker 0 │ a warning", "worker 0 │ again"]
        assert (tmp_path / "worker-1.log").read_text() == "worker 1 │ no � text\n"
        assert (tmp_path / "worker-11.log").read_text() == ""
