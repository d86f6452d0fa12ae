"""The page of a run under way, served from its folder, in a browser: a real server, real events and recorders."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stagewright.cluster import parse_placement
from stagewright.errors import UsageError
from stagewright.plan import Plan, Stage
from stagewright.runtime.run_folder import SCHEDULE_FILE, held
from stagewright.runtime.safety.flight import Flight
from stagewright.schedule import Action, Kind
from stagewright.scheduling import make_schedule
from stagewright.training.events import Teller
from stagewright.training.watching import live_server
from tests.report.test_page import WebDriverWait, browser, pytestmark, resize  # noqa: F401
from tests.training.test_display import PLAN, STEP

GIB = 1 << 30


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The address of a server for a folder."""
    with live_server(tmp_path, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


def asked(address: str) -> Any:
    with urllib.request.urlopen(f"{address}/live.json", timeout=10) as answer:
        return json.load(answer)


def two_stages(folder: Path) -> None:
    """A schedule of a worker a stage."""
    ids = parse_placement("0:0.0:1")
    stages = tuple(Stage(layers=(name,), devices=devices) for name, devices in zip("ab", ids))
    make_schedule(Plan(model="vgg16", stages=stages, batch=4, num_microbatches=2)).save(folder / SCHEDULE_FILE)


@pytest.mark.timeout(120)
def test_the_page_follows_a_run_until_it_has_ended(served: str, tmp_path: Path, browser: Any) -> None:  # noqa: F811
    resize(browser, 1280)
    browser.get(served)
    text = "return document.body.innerText"

    def until(wanted: str) -> str:
        WebDriverWait(browser, 30).until(lambda page: wanted in page.execute_script(text), f"no {wanted!r}")
        return str(browser.execute_script(text))

    until(f"Waiting for a run in {tmp_path}")
    folder = tmp_path / "vgg16"
    with held(folder, "vgg16", {"model": "vgg16"}, resume=None, overwrite=False), closing(Teller(folder)) as teller:
        two_stages(folder)
        with closing(Flight(folder, 0)) as first, closing(Flight(folder, 1)) as last:
            first.note_memory(7 * GIB)
            first.note(Action(Kind.FORWARD, 0, 5, 0))
            last.note(Action(Kind.FORWARD, 1, 5, 0))
            teller.tell("plan", **PLAN, first_step=0, predicted=1501.0, predicted_on="titan-v-8")
            teller.tell("train", **STEP)
            told = until("now 0:0")
            assert "vgg16: epoch 3 of 4, step 3,490 of 5,720" in told
            for figure in ("5.843", "1,488", "6.9 GiB / 3.1 GiB", "1,501 images/s", "7.0 GiB", "F1.0 of batch 5"):
                assert figure in told
            first.note(Action(Kind.SEND_FORWARD, 0, 5, 0, 1))
            teller.tell("train", **{**STEP, "iter": 3500, "loss": float("nan")})
            teller.tell("checkpoint", text="step 3500 saved")
            told = until("checkpoint: step 3500 saved")
            assert "step 3,500 of 5,720" in told
            assert "not a number" in told
            until("nobody")
            assert browser.execute_script("return stagewright.charts.map((one) => one.chart !== null)") == [True] * 3
    resize(browser, 400)
    fits = "const r = document.documentElement; return r.scrollWidth <= r.clientWidth && r.clientWidth <= 400"
    WebDriverWait(browser, 30).until(lambda page: page.execute_script(fits), "too wide for a phone")
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_what_a_run_told_is_read_once_and_a_run_begun_anew_begins_its_curves_anew(served: str, tmp_path: Path) -> None:
    assert asked(served)["runs"] == []
    folder = tmp_path / "run"
    folder.mkdir()
    with closing(Teller(folder)) as teller:
        for first_step, kept in ((0, [10]), (10, [10, 10]), (0, [10])):
            teller.tell("plan", **PLAN, first_step=first_step)
            teller.tell("train", **{**STEP, "iter": 10})
            [run] = asked(served)["runs"]
            assert [point[0] for point in run["points"]] == kept
    assert (run["name"], run["state"], run["workers"]) == ("run", "ended", [])


def test_prometheus_reads_the_newest_figures_of_every_run(served: str, tmp_path: Path) -> None:
    (tmp_path / 'a "run"').mkdir()
    with closing(Teller(tmp_path / 'a "run"')) as teller:
        teller.tell("plan", **PLAN, first_step=0)
        for number in (10, 20):
            teller.tell("train", **{**STEP, "iter": number, "stage_memory_bytes": [GIB, 2 * GIB]})
    with urllib.request.urlopen(f"{served}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    run = r'run="a \"run\""'
    assert f"stagewright_running{{{run}}} 0" in lines
    assert f"stagewright_step{{{run}}} 20" in lines
    assert f'stagewright_memory_bytes{{{run},stage="1"}} {2 * GIB}' in lines
    assert f"stagewright_loss{{{run}}} {STEP['loss']}" in lines


def test_only_this_machine_is_answered_and_only_four_addresses(served: str, tmp_path: Path) -> None:
    other = urllib.request.Request(f"{served}/live.json", headers={"Host": "evil.example"})
    for request, status in ((other, 404), (f"{served}/../etc/passwd", 404), (f"{served}/report.html", 503)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=10)
        refused.value.close()
        assert refused.value.code == status
    with pytest.raises(UsageError, match=r"--port \d+: Address already in use"):
        live_server(tmp_path, int(served.rpartition(":")[2]))
    with pytest.raises(UsageError, match="no such folder"):
        live_server(tmp_path / "none", 0)
