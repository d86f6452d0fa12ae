"""The page in a browser: quiet, self-contained, sortable, hoverable, narrow enough, quick."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagewright.cli import main
from stagewright.cluster import find_cluster
from stagewright.profiling.detect import join_hosts
from stagewright.record import Record
from stagewright.report import make_report
from stagewright.report.timeline import _action_text

from .synthetic import make_record, make_suite

selenium = pytest.importorskip("selenium", reason="selenium is not installed: pip install selenium")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="chromium or chromedriver is missing: apt-get install chromium chromium-driver"
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1240,900"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records, failures, clusters = make_suite()
    evil = "</script><script>document.title = 'broken'</script><img src=http://127.0.0.1:9/x onerror=alert(1)>"
    records.append(make_record(evil, notes=(evil,), limit=evil))
    return make_report(records, tmp_path_factory.mktemp("page"), failures=failures, clusters=clusters).page


@pytest.fixture
def fresh(browser: Any, page: Path) -> Any:
    """The page, loaded anew, with nothing in the logs from before."""
    resize(browser, 1240)
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(page.as_uri())
    return browser


@pytest.fixture
def opened(browser: Any, page: Path) -> Any:
    """The page with its first run shown at its first range, loaded only if another test left it otherwise."""
    if browser.current_url != page.as_uri() or browser.execute_script("return window.innerWidth") != 1240:
        resize(browser, 1240)
        browser.get(page.as_uri())
    show_run(browser, 0)
    return browser


def show_run(browser: Any, number: int) -> None:
    choose = "const s = document.getElementById('run'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))"
    browser.execute_script(choose, number)


def resize(browser: Any, width: int, height: int = 900) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def column(browser: Any, table: str, place: int) -> list[str]:
    cells = browser.execute_script(
        "return [...document.querySelectorAll(`#${arguments[0]} tbody tr:not(.failed)`)]"
        ".map((row) => row.cells[arguments[1]].firstChild.textContent.trim())",
        table,
        place,
    )
    return list(cells)


def test_it_opens_without_an_error(fresh: Any) -> None:
    assert fresh.get_log("browser") == []
    assert int(fresh.execute_script("return document.documentElement.dataset.ready")) > 0
    assert fresh.title == "VGG16, ResNet50 · Stagewright report"


def test_no_request_leaves_the_file(fresh: Any, page: Path) -> None:
    sent = [
        entry["message"] for entry in fresh.get_log("performance") if "Network.requestWillBeSent" in entry["message"]
    ]
    assert [text for text in sent if page.name not in text and "data:" not in text] == []
    resources = fresh.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [name for name in resources if not name.startswith("data:")] == []


def test_a_click_on_a_heading_sorts_and_a_second_one_turns_it_round(opened: Any) -> None:
    head = opened.find_element(By.XPATH, "//table[@id='case-table']//button[contains(., 'samples/s')]")
    place = 1

    head.click()
    falling = [float(text.replace(",", "")) for text in column(opened, "case-table", place)]
    head.click()
    rising = [float(text.replace(",", "")) for text in column(opened, "case-table", place)]

    assert falling == sorted(falling, reverse=True)
    assert rising == sorted(rising)
    assert falling != rising
    last = opened.execute_script("return document.querySelector('#case-table tbody tr:last-child').className")
    assert last == "failed"


def test_words_sort_by_the_alphabet(opened: Any) -> None:
    opened.find_element(By.XPATH, "//table[@id='case-table']//button[contains(., 'type')]").click()
    told = column(opened, "case-table", 4)
    assert told == sorted(told)


def choose(browser: Any, element: str, value: str, event: str) -> None:
    change = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event(arguments[2]))"
    browser.execute_script(change, browser.find_element(By.ID, element), value, event)


def bars(browser: Any) -> list[list[str]]:
    """The names beside the bars of each chart of throughput that is drawn."""
    found = browser.execute_script(
        "const all = stagewright.charts.filter((one) => one.isFiltered && one.element.offsetParent);"
        "return all.map((one) => { one.open();"
        "const axis = one.chart.getOption().yAxis; return axis.length === 2 ? axis[0].data : null; })"
    )
    return [names for names in found if names]


def test_a_filter_leaves_the_cases_that_have_all_its_words_in_tables_and_charts(fresh: Any) -> None:
    everything = bars(fresh)
    assert len(everything) > 1
    choose(fresh, "filter", "SSP rehearsed", "input")
    assert column(fresh, "case-table", 0) == ["vgg16-7-1"]
    assert column(fresh, "scaling-table", 0) == ["vgg16-7-1"]
    assert [[name.split(" · ")[0] for name in names] for names in bars(fresh)] == [["◐\u00a0vgg16-7-1"]]
    assert fresh.execute_script("return document.getElementById('filtered').textContent").startswith("1 of ")
    choose(fresh, "filter", "no such case", "input")
    assert (column(fresh, "case-table", 0), bars(fresh)) == ([], [])
    choose(fresh, "filter", "", "input")
    assert bars(fresh) == everything


def test_cases_stand_in_groups_and_sort_inside_them(fresh: Any) -> None:
    choose(fresh, "group", "model", "change")
    fresh.find_element(By.XPATH, "//table[@id='case-table']//button[contains(., 'samples/s')]").click()
    rows = fresh.execute_script(
        "return [...document.querySelectorAll('#case-table tbody tr')].map((row) =>"
        "row.className === 'group' ? row.innerText.trim() : Number(row.cells[1].dataset.sort) || 0)"
    )
    heads = [place for place, row in enumerate(rows) if isinstance(row, str)]
    assert [rows[place].split(" · ")[0] for place in heads] == ["ResNet50", "VGG16", "failed"]
    for start, stop in zip(heads, [*heads[1:], len(rows)]):
        assert rows[start].endswith(f" · {stop - start - 1}")
        assert rows[start + 1 : stop] == sorted(rows[start + 1 : stop], reverse=True)


def test_the_cases_fit_1280_px_and_the_rest_is_there_on_demand(fresh: Any) -> None:
    resize(fresh, 1280)
    fresh.refresh()
    room = "const s = document.querySelector('#cases .scroll'); return [s.scrollWidth, s.clientWidth]"
    shown = (
        "return [...document.querySelectorAll('#case-table th')].filter((h) => h.offsetParent).map((h) => h.innerText)"
    )
    needed, there = fresh.execute_script(room)
    assert needed <= there
    usual = fresh.execute_script(shown)
    fresh.find_element(By.ID, "columns").click()
    everything = fresh.execute_script(shown)
    assert everything[: len(usual)] == usual
    assert everything[len(usual) :] == ["model", "data", "schedule", "epoch time", "log"]


def test_the_rate_is_what_a_phone_shows_beside_the_name(fresh: Any) -> None:
    resize(fresh, 400)
    fresh.refresh()
    edge, text = fresh.execute_script(
        "const cell = document.querySelector('#case-table tbody tr').cells[1];"
        "return [cell.getBoundingClientRect().right, cell.innerText]"
    )
    assert edge <= 400
    assert text.startswith("1,4")


def hover(browser: Any, worker: int, kind: str) -> str:
    """What the page shows over the first span of a kind in view."""
    chart = browser.find_element(By.ID, "timeline-chart")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", chart)
    x, y = browser.execute_script(
        """
        const { run, range, timeline } = stagewright.state;
        const item = run.items.find(([w, lane, start, stop, i]) => w === arguments[0] && lane === 0
          && run.spans.kinds[run.spans.kind[i]] === arguments[1] && start >= range[0] && stop <= range[1]);
        const [x, y] = timeline.chart.convertToPixel("grid", [(item[2] + item[3]) / 2, item[0]]);
        return [x, y - 8];
        """,
        worker,
        kind,
    )
    size = chart.size
    ActionChains(browser).move_to_element_with_offset(chart, x - size["width"] / 2, y - size["height"] / 2).perform()
    ActionChains(browser).move_by_offset(1, 0).perform()
    shown = "return document.querySelector('#timeline-chart .tip')?.innerText || ''"
    return str(WebDriverWait(browser, 30).until(lambda page: page.execute_script(shown)))


@pytest.mark.parametrize(("worker", "kind", "told"), [(0, "F", "F0.0 · forward"), (7, "B", "B1.0 · backward")])
def test_hovering_a_span_shows_its_action(opened: Any, worker: int, kind: str, told: str) -> None:
    text = hover(opened, worker, kind)
    assert told in text
    assert f"worker {worker}, 0:{worker} · stage {worker // 7}" in text


def test_buttons_zoom(opened: Any) -> None:
    def width() -> float:
        return float(opened.execute_script("return stagewright.state.range[1] - stagewright.state.range[0]"))

    step = width()
    opened.execute_script("document.getElementById('closer').click()")
    assert width() == pytest.approx(step / 2, rel=0.01)
    opened.execute_script("document.getElementById('whole').click()")
    assert width() == pytest.approx(float(opened.execute_script("return stagewright.state.run.end")), rel=0.01)


def test_every_run_can_be_shown(opened: Any) -> None:
    number = opened.execute_script("return document.getElementById('run').options.length")
    opened.get_log("browser")
    for index in range(number):
        show_run(opened, index)
    assert number == 12
    assert opened.get_log("browser") == []


def test_the_stages_of_the_run_stand_on_the_cluster(opened: Any) -> None:
    told = opened.execute_script(
        "return [...document.querySelectorAll('[data-cluster=\"titan-v-8\"] .stage-name')].map((e) => e.textContent)"
    )
    assert told == ["stage 0"] * 7 + ["stage 1"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_light_and_dark(fresh: Any, scheme: str) -> None:
    feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    fresh.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
    resize(fresh, 400)
    fresh.refresh()
    room, needed = fresh.execute_script("const r = document.documentElement; return [r.clientWidth, r.scrollWidth]")
    paper = fresh.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert needed <= room <= 400
    assert paper == {"light": "rgb(252, 252, 250)", "dark": "rgb(20, 21, 25)"}[scheme]
    assert fresh.get_log("browser") == []


def big_record() -> Record:
    """8 workers with 2,000 spans each."""
    full = make_record("big", num_microbatches=10, num_batches=100)
    seen: Counter[int] = Counter()
    kept = []
    for span in sorted(full.spans, key=lambda span: span.start_s):
        seen[span.worker] += 1
        if seen[span.worker] <= 2000:
            kept.append(span)
    return dataclasses.replace(full, spans=tuple(kept))


def processor_s(browser: Any, page: Path) -> float:
    """What the page's own thread computes until it is there, the least of five: no other work of the machine counts."""

    def so_far() -> float:
        metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))

    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    taken = []
    for _ in range(5):
        browser.get("about:blank")
        before = so_far()
        browser.get(page.as_uri())
        assert browser.execute_script("return stagewright.readyMs") > 0
        taken.append(so_far() - before)
    browser.execute_cdp_cmd("Performance.disable", {})
    return min(taken)


def test_a_page_of_8_times_2000_spans_opens_in_under_two_seconds(browser: Any, tmp_path: Path) -> None:
    record = big_record()
    assert len(record.spans) == 16_000
    page = make_report([record], tmp_path).page
    resize(browser, 1240)
    assert processor_s(browser, page) < 1.5
    assert browser.execute_script("return stagewright.state.run.items.length") == 16_000


SUITE = {
    "resnet50-ssp-2x8": "resnet50 --placement 0:0-7,1:0-7.0:0-7,1:0-7 --batch 512 --staleness ssp",
    "alexnet-ssp": "alexnet-of --placement 0:0-6.0:7 --batch 1764 --staleness ssp --ratio 15:1",
    "vgg16-ssp": "vgg16 --placement 0:0-6.0:7 --batch 224 --staleness ssp --ratio 3:1",
    "vgg16-dp-8": "vgg16 --batch 256",
    "resnet50-dp-1": "resnet50 --placement 0:0 --batch 64",
}
"""A case of each size in the suite of 68; on two hosts of titan-v-8 where it needs them."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """As many simulated records as that suite has, some with hundreds of spans and some with thousands."""
    folder = tmp_path_factory.mktemp("rows")
    one = find_cluster("titan-v-8")
    two = join_hosts(one.hosts * 2, "two").save(folder / "two.yaml")
    found = []
    for name, line in SUITE.items():
        file = folder / f"{name}.record.json"
        with pytest.raises(SystemExit) as ended:
            main(["simulate", *line.split(), "--cluster", str(two) if "1:0" in line else one.name, "-o", str(file)])
        assert not ended.value.code
        found.append(dataclasses.replace(Record.load(file), name=name))
    many = (dataclasses.replace(record, name=f"{record.name}-{number}") for number in range(14) for record in found)
    return list(many)[:68]


@pytest.mark.timeout(300)
def test_68_simulated_rows_weigh_under_3_mb_and_can_be_used_within_a_second(
    browser: Any, tmp_path: Path, rows: list[Record]
) -> None:
    page = make_report(rows, tmp_path).page
    resize(browser, 1240)
    assert page.stat().st_size < 3_000_000
    assert processor_s(browser, page) < 0.7


@pytest.mark.timeout(300)
def test_nothing_of_a_run_is_lost_on_the_way(browser: Any, tmp_path: Path, rows: list[Record]) -> None:
    """Workers and devices that did the same share columns in the file; they are written out when they are shown."""
    record = rows[1]
    page = make_report([record], tmp_path).page
    browser.get(page.as_uri())
    start_s = min(span.start_s for span in record.spans)
    shown = browser.execute_script(
        "const s = stagewright.state.run.spans;"
        "return s.worker.map((w, i) => [w, s.kinds[s.kind[i]], s.batch[i], s.text[i], s.start[i], s.length[i]])"
    )
    wanted = [
        (span.worker, span.kind, span.batch, _action_text(span), (span.start_s - start_s) * 1e6,
         (span.stop_s - span.start_s) * 1e6)
        for span in record.spans
    ]  # fmt: skip
    for seen, want in zip(sorted(shown), sorted(wanted), strict=True):
        assert tuple(seen[:4]) == want[:4]
        assert seen[4:] == pytest.approx(want[4:], abs=0.006)
    curves = browser.execute_script("return stagewright.state.run.memory")
    assert [curve["device"] for curve in curves] == [use.device for use in record.devices]
    for curve, use in zip(curves, record.devices):
        assert curve["parts"] == {kind: list(values) for kind, values in use.memory_parts.items()}


@pytest.mark.timeout(300)
def test_charts_are_drawn_when_they_come_near_and_when_the_page_is_printed(
    browser: Any, tmp_path: Path, rows: list[Record]
) -> None:
    resize(browser, 1240)
    browser.get(make_report(rows, tmp_path).page.as_uri())
    drawn = "return stagewright.charts.filter((entry) => entry.chart).length"
    at_first, number = browser.execute_script(drawn), browser.execute_script("return stagewright.charts.length")
    assert at_first < number
    browser.execute_script("document.getElementById('families').scrollIntoView({behavior: 'instant'})")
    WebDriverWait(browser, 30).until(lambda page: page.execute_script(drawn) > at_first)
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script(drawn) == number
