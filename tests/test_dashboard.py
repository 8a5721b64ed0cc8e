"""The dashboard: what it reads and keeps, who may ask, and the page in a real Chromium."""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from browser import CHROMIUM, DRIVER, Browser
from paceline.dashboard.run_index import RunIndex
from paceline.dashboard.run_view import RunView
from paceline.dashboard.server import SERVER_STYLES, Dashboard
from paceline.dashboard.time_bins import DownsampledCurve, TimeBins
from paceline.errors import UsageError
from paceline.report.charts import PHASE_STYLES, STRATEGY_COLOURS
from paceline.telemetry import events as ev
from paceline.telemetry.run_folder import EventWriter
from run_folders import Recording, record

# ---- bins


@given(
    st.lists(st.tuples(st.floats(0.01, 5000), st.floats(0.001, 50), st.floats(0, 10)), max_size=60)
)
def test_sums_survive_every_merging(windows: list[tuple[float, float, float]]) -> None:
    bins = TimeBins(most=16)
    for end, length, amount in windows:
        bins.add("x", end, length, [amount])
    table = bins.sums("x")
    total = 0.0 if table is None else float(table.sum())
    assert total == pytest.approx(sum(amount for _, _, amount in windows), abs=1e-6)
    assert bins.used <= 16


@given(st.lists(st.tuples(st.floats(0, 5000), st.floats(0, 10)), min_size=1, max_size=60))
def test_peaks_survive_every_merging(points: list[tuple[float, float]]) -> None:
    bins = TimeBins(most=16)
    for at, value in points:
        bins.set_max("x", at, [value])
    table = bins.peaks("x")
    assert table is not None
    assert float(table.max()) == max(value for _, value in points)


def test_a_curve_keeps_its_ends_and_a_bound() -> None:
    curve = DownsampledCurve(most=100)
    for i in range(10_000):
        curve.add([float(i), None])
    points = curve.list_points()
    assert len(points) <= 102
    assert points[0][0] == 0.0
    assert points[-1][0] == 9999.0


# ---- one run followed


def tell(run: RunView, **given: Any) -> dict[str, Any]:
    return run.payload(**{"generation": "", "first": 0, "who": None, **given})


def test_phases_of_every_process_add_up(tmp_path: Path) -> None:
    record(tmp_path / "run", workers=3, seconds=30)
    run = RunView(tmp_path / "run")
    assert run.poll(budget_s=60)
    told = tell(run)
    assert [row["who"] for row in told["timeline"]] == [
        *(f"worker-{k}" for k in range(3)),
        "server-0",
    ]
    for row in told["timeline"]:
        assert sum(row["totals"]) == pytest.approx(30, rel=0.02)
        shares = np.frombuffer(base64.b64decode(row["shares"]), np.uint8)
        assert len(shares) == told["bins"] * len(row["phases"])
    assert told["switches"][0]["reason"] == "at=50%"
    assert told["verdicts"][0]["rule"] == "straggler"
    assert sum(told["staleness"]["histogram"].values()) == 3 * 20 * 15
    assert told["resources"]["worker"]["count"] == 3
    assert told["machines"][0]["host"] == "node-0"


def test_only_what_is_new_is_told(tmp_path: Path) -> None:
    live = Recording(tmp_path / "run", workers=4, seconds=300)
    for _ in range(100):
        live.write_second()
    run = RunView(tmp_path / "run")
    run.poll(budget_s=60)
    first = tell(run)
    live.write_second()
    run.poll(budget_s=60)
    second = tell(run, generation=first["generation"], first=first["bins"])
    assert second["from"] >= first["bins"] - 5
    assert len(json.dumps(second["timeline"])) < len(json.dumps(first["timeline"])) / 4
    # A page that knows an older form of the time axis gets everything again.
    assert tell(run, generation="another", first=50)["from"] == 0
    live.close()


def test_a_run_in_place_of_another_is_read_anew(tmp_path: Path) -> None:
    record(tmp_path / "run", workers=2, seconds=40)
    run = RunView(tmp_path / "run")
    run.poll(budget_s=60)
    before = tell(run)["generation"]
    record(tmp_path / "run", workers=2, seconds=6)
    run.poll(budget_s=60)
    run.poll(budget_s=60)
    told = tell(run)
    assert told["generation"] != before
    assert told["bins"] <= 8


def is_whole(path: Path) -> bool:
    """Whether a file that was cut happens to end where nothing is torn."""
    data = path.read_bytes()
    if path.suffix == ".jsonl":
        return not data or data.endswith(b"\n")
    try:
        return isinstance(json.loads(data), dict)
    except ValueError:
        return False


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1), which=st.integers(0, 3))
def test_a_folder_cut_at_any_byte_opens(
    tmp_path_factory: pytest.TempPathFactory, share: float, which: int
) -> None:
    folder = tmp_path_factory.mktemp("cut") / "run"
    record(folder, workers=2, seconds=5, steps_per_s=3)
    path = [folder / "result.json", folder / "run.json", folder / "events" / "run.jsonl",
            folder / "events" / "worker-0.jsonl"][which]  # fmt: skip
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    shelf = RunIndex(folder.parent)
    shelf.refresh()
    runs = shelf.list_runs()
    assert len(runs) == 1
    told = shelf.run_payload(runs[0]["id"], generation="", first=0, who="worker-0")
    assert told is not None
    json.dumps(told)
    assert is_whole(path) or any(path.name in text for text in told["missing"])


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    live = Recording(tmp_path / "run", workers=1, servers=0, seconds=100)
    live.write_second()
    live.close()
    line = ev.RunProgress(t=2.0, epoch=0, samples=777, updates=1, loss=1.0).to_line() + "\n"
    path = tmp_path / "run" / "events" / "run.jsonl"
    run = RunView(tmp_path / "run")
    with path.open("a", encoding="utf-8") as file:
        file.write(line[:20])
        file.flush()
        run.poll(budget_s=60)
        assert tell(run)["loss"][-1][1] != 777
        file.write(line[20:])
        file.flush()
        run.poll(budget_s=60)
        assert tell(run)["loss"][-1][1] == 777


def test_events_that_make_no_sense_are_passed_over(tmp_path: Path) -> None:
    record(tmp_path / "run", workers=1, servers=0, seconds=5)
    strange = ('{"kind":"vitals","t":"x"}\n{"kind":"vitals","t":1,"dt":0,"phases":7}\n[1]\n'
               '{"kind":"steps","t":2,"staleness":["a"]}\nnot json\n{"kind":"epoch","t":1}\n'
               '{"kind":"progress","t":1,"samples":"many"}\n')  # fmt: skip
    for who in ("run", "worker-0"):
        with (tmp_path / "run" / "events" / f"{who}.jsonl").open("a") as file:
            file.write(strange)
    shelf = RunIndex(tmp_path)
    shelf.refresh()
    told = shelf.run_payload("run", generation="", first=0, who=None)
    assert told is not None
    json.dumps(told)


@pytest.mark.parametrize("workers", [64])
def test_thousands_of_updates_a_second_are_kept_up_with(tmp_path: Path, workers: int) -> None:
    """A second of 64 workers at 80 steps each takes well below a second of processor to read."""
    live = Recording(tmp_path / "run", workers=workers, seconds=600, steps_per_s=80)
    live.write_second()
    run = RunView(tmp_path / "run")
    run.poll(budget_s=60)
    told = tell(run)
    used_s, seconds = 0.0, 15
    for _ in range(seconds):
        live.write_second()
        began = time.process_time()
        assert run.poll(budget_s=60)
        told = tell(run, generation=told["generation"], first=told["bins"])
        json.dumps(told)
        used_s += time.process_time() - began
    live.close()
    assert used_s / seconds < 0.5, f"{used_s / seconds:.3f} s for each second of the run"
    assert told["bins"] >= seconds


# ---- who may ask


def start_serving(dashboard: Dashboard) -> threading.Thread:
    """Serves in a thread until the dashboard is stopped."""
    thread = threading.Thread(target=dashboard.serve, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Dashboard]:
    record(tmp_path / "runs" / "first", workers=2, seconds=5)
    dashboard = Dashboard(tmp_path / "runs")
    thread = start_serving(dashboard)
    yield dashboard
    dashboard.stop()
    thread.join(timeout=20)


def ask(board: Dashboard, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", board.port, timeout=20)
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


def test_the_list_and_a_run_over_http(board: Dashboard) -> None:
    answer = ask(board, "/api/runs")
    assert answer.status == 200
    (run,) = json.loads(answer.read())["runs"]
    assert (run["id"], run["status"], run["share"]) == ("first", "done", 1.0)
    told = json.loads(ask(board, "/api/run?id=first").read())
    assert told["bins"] == 6
    assert ask(board, "/api/run?id=../../etc").status == 404
    assert ask(board, "/../../../etc/passwd").status == 404
    assert ask(board, "/api/run").status == 404
    assert ask(board, "/api/run?id=first&from=-3&generation=x").status == 200


def test_a_strange_name_for_this_machine_is_refused(board: Dashboard) -> None:
    """A page elsewhere whose name was pointed at 127.0.0.1 must not read the runs."""
    assert ask(board, "/api/runs", Host="evil.example").status == 403
    assert ask(board, "/api/runs", Host=f"localhost:{board.port}").status == 200
    assert ask(board, "/api/runs", Host="[::1]:80").status == 200


def test_a_token_is_asked_for(tmp_path: Path) -> None:
    dashboard = Dashboard(tmp_path, ask_token=True)
    thread = start_serving(dashboard)
    try:
        assert ask(dashboard, "/").status == 403
        assert ask(dashboard, "/api/runs?token=wrong").status == 403
        assert ask(dashboard, "/api/runs", Cookie="paceline-token=wrong").status == 403
        given = ask(dashboard, f"/?token={dashboard.token}")
        assert given.status == 303
        cookie = given.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert ask(dashboard, "/api/runs", Cookie=cookie.split(";")[0]).status == 200
        assert dashboard.token is not None
        assert dashboard.token in dashboard.url
    finally:
        dashboard.stop()
        thread.join(timeout=20)


def test_other_addresses_always_have_a_token(tmp_path: Path) -> None:
    dashboard = Dashboard(tmp_path, host="0.0.0.0")
    dashboard.close()
    assert dashboard.token is not None
    here = Dashboard(tmp_path)
    here.close()
    assert here.token is None


def test_mistakes_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a directory"):
        Dashboard(tmp_path / "none")
    with pytest.raises(UsageError, match="--port"):
        Dashboard(tmp_path, port=70000)
    with pytest.raises(UsageError, match="cannot listen"):
        Dashboard(tmp_path, host="203.0.113.7")


def test_the_command_serves_until_it_is_ended(tmp_path: Path) -> None:
    record(tmp_path / "one", workers=1, servers=0, seconds=3)
    command = [sys.executable, "-m", "paceline.cli.main", "dashboard", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        try:
            assert run.stdout is not None
            line = run.stdout.readline()
            address = urlsplit(line.removeprefix("dashboard: ").strip())
            assert (address.scheme, address.hostname) == ("http", "127.0.0.1")
            connection = http.client.HTTPConnection("127.0.0.1", address.port or 0, timeout=30)
            connection.request("GET", "/")
            page = connection.getresponse().read().decode()
            assert "Paceline" in page
            assert "http://" not in page.replace("http://www.w3.org", "")
            run.terminate()
            assert run.wait(timeout=60) == 130
        finally:
            run.kill()


# ---- colours


def see_as(colour: str, matrix: list[list[float]]) -> np.ndarray[Any, Any]:
    """A colour in CIE Lab, as someone with another set of cones sees it."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(matrix) @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = (xyz @ linear) / np.array([0.9505, 1.0, 1.089])
    f = [t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z)]
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision
# Deficiency", 2009, severity 1.
EYES = {
    "usual": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
               [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
               [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
               [0.004733, 0.691367, 0.303900]],
}  # fmt: skip


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("styles", [PHASE_STYLES, SERVER_STYLES], ids=["worker", "server"])
def test_phases_are_told_apart_by_colour_or_hatching(
    eyes: str, styles: dict[str, tuple[str, str]]
) -> None:
    for (a, (one, hatch)), (b, (other, hatching)) in itertools.combinations(styles.items(), 2):
        if hatch == hatching:
            distance = np.linalg.norm(see_as(one, EYES[eyes]) - see_as(other, EYES[eyes]))
            assert distance > 10, f"{a} and {b} look alike ({distance:.1f})"


@pytest.mark.parametrize("eyes", EYES)
def test_lines_are_told_apart(eyes: str) -> None:
    for one, other in itertools.combinations(STRATEGY_COLOURS, 2):
        assert np.linalg.norm(see_as(one, EYES[eyes]) - see_as(other, EYES[eyes])) > 10


# ---- the page, in a browser

needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="the page is not looked at: install Debian's chromium and chromium-driver",
)


class Site:
    """Fifty runs, one of 64 workers and one of 2 going on, and a browser in front of them."""

    def __init__(self, root: Path) -> None:
        for k in range(48):
            status = "failed" if k == 7 else "done"
            record(root / f"old-{k:02d}", workers=2, seconds=20, seed=k, status=status)
        self.big = Recording(root / "big", workers=64, servers=2, seconds=200, steps_per_s=40)
        self.live = Recording(root / "live", workers=2, seconds=600)
        for _ in range(150):
            self.big.write_second()
        for _ in range(30):
            self.live.write_second()
        self._stop = threading.Event()
        self._writer = threading.Thread(target=self._go_on, daemon=True)
        self._writer.start()
        self.board = Dashboard(root)
        self._server = start_serving(self.board)
        self.browser = Browser()

    def _go_on(self) -> None:
        while not self._stop.wait(1.0):
            self.big.write_second()

    def close(self) -> None:
        self.browser.close()
        self._stop.set()
        self._writer.join(timeout=20)
        self.board.stop()
        self._server.join(timeout=20)

    def open(self, fragment: str = "") -> None:
        # By way of an empty page: another fragment alone would not load the page anew.
        self.browser.open("about:blank")
        self.browser.open(self.board.url + fragment)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"))
    yield made
    made.close()


@pytest.mark.exclusive
@needs_browser
@pytest.mark.timeout(300)
def test_fifty_runs_are_painted_within_a_second(site: Site) -> None:
    script = "performance.getEntriesByName('first-contentful-paint').map(e => e.startTime)[0]"
    times = []
    for _ in range(3):
        site.open()
        times.append(site.browser.wait_for(script))
        assert site.browser.run("return document.querySelectorAll('#runs li').length") == 50
    assert min(times) < 1000
    assert site.browser.list_complaints() == []


@pytest.mark.exclusive
@needs_browser
@pytest.mark.timeout(300)
def test_an_event_is_seen_within_two_seconds(site: Site) -> None:
    site.open("#run=live")
    site.browser.wait_for("state.view && state.view.payload")
    run = EventWriter(site.live.folder.events("run"))
    waits = []
    for k in range(4):
        samples = 1_000_000 + k
        run.write(ev.RunProgress(t=31.0 + k, epoch=0, samples=samples, updates=1, loss=0.1))
        began = time.monotonic()
        site.browser.wait_for(f"state.view.payload.loss.some(p => p[1] === {samples})")
        waits.append(time.monotonic() - began)
    run.close()
    assert min(waits) < 2.0, waits
    assert sorted(waits)[1] < 2.5, waits
    assert site.browser.list_complaints() == []


@needs_browser
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("ident", ["live", "big"])
def test_the_page_fits_and_does_not_complain(
    site: Site, ident: str, width: int, dark: bool
) -> None:
    site.browser.resize(width, 900)
    site.browser.set_dark(dark)
    site.open(f"#run={ident}")
    site.browser.wait_for("state.view && state.view.payload && state.view.payload.reading === 1")
    site.browser.wait_for("document.querySelectorAll('.legend li').length > 3")
    assert site.browser.run("return document.documentElement.scrollWidth") <= width
    text = site.browser.run("return document.querySelector('main').innerText")
    for words in ("Time categories", "Training loss", "Resources", "2.9x slower"):
        assert words in text
    back = site.browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(20, 23, 28)") == dark
    # Something is drawn: a canvas of one colour would be an empty one.
    drawn = site.browser.run(
        "const c = state.view.timeline.canvas; const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; const seen = new Set();"
        "for (let i = 0; i < d.length; i += 400) seen.add(d[i] + ',' + d[i+1] + ',' + d[i+2]);"
        "return seen.size"
    )
    assert drawn > 4
    assert site.browser.list_complaints() == []


@needs_browser
@pytest.mark.timeout(300)
def test_everything_can_be_reached_by_keyboard(site: Site) -> None:
    site.browser.resize(1280, 900)
    site.browser.set_dark(False)
    site.open("#run=live")
    site.browser.wait_for("state.view && state.view.payload")
    seen = []
    for _ in range(16):
        site.browser.press("Tab")
        seen.append(
            site.browser.run(
                "const a = document.activeElement;"
                "return a.id || a.getAttribute('href') || a.tagName"
            )
        )
    assert seen[0] == "#view"
    assert "filter" in seen
    assert "#run=big" in seen
    # Open another run by its link alone.
    site.browser.run("document.querySelector('#runs a[href=\"#run=big\"]').focus()")
    site.browser.press("Enter")
    site.browser.wait_for("state.view && state.view.id === 'big' && state.view.payload")
    # Read the timeline and a chart without a mouse.
    site.browser.run("state.view.timeline.canvas.focus()")
    site.browser.press("ArrowDown", "ArrowDown")
    said = site.browser.run("return state.view.timeline.readout.textContent")
    assert said.startswith("worker 1,")
    site.browser.run("state.view.charts.cpu.canvas.focus()")
    site.browser.press("ArrowRight", "ArrowRight")
    assert "workers" in site.browser.run("return state.view.charts.cpu.readout.textContent")
    # Every thing that can be focused shows that it is.
    outline = site.browser.run("return getComputedStyle(state.view.charts.cpu.canvas).outlineStyle")
    assert outline == "solid"
    assert site.browser.list_complaints() == []


@needs_browser
@pytest.mark.timeout(300)
def test_selected_runs_are_compared(site: Site) -> None:
    site.open("#run=live")
    site.browser.wait_for("state.view && state.view.payload")
    assert site.browser.run("return document.getElementById('compare').disabled")
    for ident in ("old-00", "old-01"):
        site.browser.run(
            "document.querySelector(`li[data-id='${arguments[0]}'] input`).click()", ident
        )
    site.browser.run("document.getElementById('compare').click()")
    site.browser.wait_for("state.view && state.view.runs && state.view.runs.length === 2")
    text = site.browser.run("return document.querySelector('main').innerText")
    assert "2 runs compared" in text
    assert "below 1 is faster" in text
    assert site.browser.list_complaints() == []


@needs_browser
@pytest.mark.timeout(300)
def test_names_from_a_folder_are_text(site: Site, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    record(tmp_path / "runs" / hostile, workers=1, servers=0, seconds=3,
           strategy="</script><script>alert(2)</script>")  # fmt: skip
    board = Dashboard(tmp_path / "runs")
    thread = start_serving(board)
    try:
        site.browser.open(board.url)
        site.browser.wait_for("state.view && state.view.payload")
        assert hostile in site.browser.run("return document.querySelector('main').innerText")
        assert site.browser.run("return document.querySelectorAll('img').length") == 0
        assert site.browser.list_complaints() == []
    finally:
        site.browser.open("about:blank")
        board.stop()
        thread.join(timeout=20)


@needs_browser
@pytest.mark.timeout(300)
def test_a_server_that_went_away_is_said(site: Site, tmp_path: Path) -> None:
    record(tmp_path / "runs" / "one", workers=1, servers=0, seconds=3)
    board = Dashboard(tmp_path / "runs")
    thread = start_serving(board)
    site.browser.open(board.url)
    site.browser.wait_for("state.view && state.view.payload")
    board.stop()
    thread.join(timeout=20)
    site.browser.wait_for("document.getElementById('pulse').className === 'lost'")
    assert "outdated" in site.browser.run("return document.getElementById('pulse').textContent")
    site.browser.open("about:blank")
    site.browser.list_complaints()  # Refused connections are what this is about.
