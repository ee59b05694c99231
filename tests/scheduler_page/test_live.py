"""Python in the browser decides as CPython does; and what a reader can do with the page, done in Chromium."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import CHROMIUM, Page, browser
from tools.scheduler_page import build, pyodide

NODE = shutil.which("node")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
pytestmark = pytest.mark.slow

IN_NODE = """
const {loadPyodide} = require("./pyodide.js"), fs = require("fs");
(async () => {
  const lockFileContents = JSON.parse(fs.readFileSync("pyodide-lock.json"));
  const python = await loadPyodide({indexURL: process.cwd(), lockFileContents});
  python.unpackArchive(new Uint8Array(fs.readFileSync("sources.zip")), "zip");
  const browser = python.pyimport("tools.scheduler_page.in_browser");
  browser.install();
  const questions = JSON.parse(fs.readFileSync("questions.json"));
  fs.writeFileSync("answers.json", JSON.stringify(questions.map(q => JSON.parse(browser.respond(JSON.stringify(q))))));
})().catch(error => { console.error(error.message); process.exit(1); });
"""

# What is shown beyond the edge of its section, and cannot be scrolled there
OVERFLOWING = """[...document.querySelectorAll("section *")]
  .filter(node => node.offsetParent && !node.closest(".scroll"))
  .filter(node => node.getBoundingClientRect().right > node.closest("section").getBoundingClientRect().right)
  .map(node => node.outerHTML)"""


@pytest.fixture(scope="module")
def runtime() -> dict[str, bytes]:
    if not pyodide.is_sound(pyodide.archive()):
        if shutil.which("npm") is None:
            pytest.skip("there is no npm on this machine, and so no Pyodide")
        pytest.fail(f"{pyodide.archive()} is missing: run `make pyodide` once (it needs the network)", pytrace=False)
    return pyodide.files()


@pytest.mark.skipif(NODE is None, reason="there is no node on this machine")
def test_under_node_the_events_are_those_of_cpython(runtime: dict[str, bytes], tmp_path: Path) -> None:
    scenes, fleets = build.scenes(), build.fleets()
    questions = [{"do": "play", "setup": {k: v for k, v in scene.items() if k != "run"}} for scene in scenes]
    questions += [{"do": "fleet", "setup": {k: v for k, v in scene.items() if k != "run"}} for scene in fleets]
    files = runtime | {"sources.zip": build.sources(), "questions.json": json.dumps(questions).encode()}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert NODE is not None
    done = subprocess.run([NODE, "-e", IN_NODE], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads((tmp_path / "answers.json").read_text())
    recorded = json.loads(json.dumps([scene["run"] for scene in (*scenes, *fleets)]))
    assert sum(len(answer["events"]) for answer in answers[: len(scenes)]) > 400
    assert [answer.get("events") for answer in answers] == [run.get("events") for run in recorded]
    assert answers == recorded


# --- in Chromium -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(runtime: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page with Python running in it."""
    directory = tmp_path_factory.mktemp("page")
    path = directory / build.NAME
    path.write_text(build.page(runtime), encoding="utf-8")
    with browser(directory) as page:
        page.look(1280, 900)
        page.open(path.as_uri())
        page.wait("/So do the|DIFFER|not start/.test($('python').textContent)", 240)
        yield page


@pytest.fixture
def scene(live: Page) -> Any:
    """scene(number) -> the page as it opens on a scene, the question answered."""

    def opened(number: int) -> Page:
        live.js("$('mine').checked && $('mine').click(); document.querySelector('#floors button').click()")
        live.js(f"document.querySelectorAll('nav button')[{number}].click()")
        live.js("document.querySelector('.answers button').click(); stop()")
        return live

    yield opened
    assert live.console == []


def requests(page: Page) -> dict[str, Any]:
    return {request["name"]: request for request in page.js("page.setup.requests")}


def settled(page: Page) -> dict[str, Any]:
    """The totals of the run, when every change has been answered."""
    page.js("change()")
    totals: dict[str, Any] = page.js("page.run.totals")
    return totals


def middle(page: Page, selector: str) -> tuple[float, float]:
    box = page.js(f"(box => [box.x + box.width / 2, box.y + box.height / 2])"
                        f"(document.querySelector({selector!r}).getBoundingClientRect())")  # fmt: skip
    return box[0], box[1]


@needs_chromium
def test_in_chromium_the_events_are_those_of_cpython(live: Page) -> None:
    recorded = json.loads(json.dumps([scene["run"] for scene in build.scenes()]))
    asked = "SCENES.map(({run, ...setup}) => ask({do: 'play', setup}))"
    assert live.js(f"Promise.all({asked})") == recorded
    said = live.js("$('python').textContent")
    events = sum(len(run["events"]) for run in recorded)
    assert re.search(rf"in Python 3\.\d+\.\d+, which started in [\d.]+ s and gives the same {events} events", said), (
        said
    )
    decisions = sum(len(frame["why"]) for scene in build.fleets() for frame in scene["run"]["frames"])
    assert decisions > 500 and said.endswith(f"So do the fleets, decision by decision: {decisions}.")


@needs_chromium
def test_nobody_sees_the_future_before_a_guess(live: Page) -> None:
    live.js("document.querySelectorAll('nav button')[1].click()")
    hidden = "[$('play').disabled, $('totals').hidden, document.querySelectorAll('rect.decode').length]"
    assert live.js(hidden) == [True, True, 0]
    live.js("document.querySelectorAll('.answers button')[2].click(); stop()")
    assert live.js(hidden)[:2] == [False, False] and live.js(hidden)[2] > 20
    assert live.js("document.querySelector('#question .good').textContent") == "Right. "


@needs_chromium
def test_requests_are_dragged_onto_the_time_line_and_along_it(scene: Any) -> None:
    page = scene(0)
    before = settled(page)
    x, y = middle(page, "[data-flag=C]")
    cell = page.js("page.cell")
    page.drag((x, y), (x + 3 * cell, y), (x + 7 * cell, y))
    assert requests(page)["C"]["arrival"] == 8
    assert settled(page)["first"]["C"] >= 1 and settled(page) != before
    page.js("document.querySelector('#tray').scrollIntoView({block: 'end'})")
    chip, line = middle(page, "#tray button"), middle(page, "#line")
    page.drag(chip, (line[0], line[1] + 30), line)
    added = requests(page)["E"]
    assert added["output"] == 8 and added["arrival"] == page.js(f"tickAt({line[0]})") > 3
    assert settled(page)["tokens"] == 48 + added["output"]
    page.js("document.querySelector('#requests tr:last-child button').click()")
    assert set(requests(page)) == set("ABCD")


@needs_chromium
def test_the_keyboard_does_what_the_pointer_does(scene: Any) -> None:
    page = scene(0)
    page.js("document.activeElement.blur()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    page.press("ArrowLeft")
    assert page.js("page.tick") == 1
    page.js("document.querySelector('[data-flag=B]').focus()")
    for _ in range(3):
        page.press("ArrowRight")
    assert requests(page)["B"]["arrival"] == 3 and page.js("page.tick") == 1
    settled(page)
    assert page.js("document.activeElement.getAttribute('data-flag')") == "B"
    page.press("Delete")
    assert set(requests(page)) == set("ACD")
    page.js("document.querySelector('#tray button').focus()")
    page.press("Enter")
    assert requests(page)["B"]["arrival"] == 1 and settled(page)["first"].keys() == set("ABCD")


@needs_chromium
def test_knobs_change_the_run_and_refusals_are_told(scene: Any) -> None:
    page = scene(0)
    turn = "(key, value) => { const i = $('sliders').querySelectorAll('input')[key]; i.value = value; i.oninput(); }"
    page.js(f"({turn})(0, 40)")
    assert settled(page)["preemptions"] == 0
    page.js("$('sliders').querySelectorAll('input')[6].click()")
    assert settled(page)["steps"] > 12 and page.js("page.setup.static")
    page.js(f"({turn})(0, 2)")
    settled(page)
    assert "is refused" in page.js("$('why').textContent")
    assert page.js("$('totals').textContent").count("(before: ") >= 2


@needs_chromium
def test_the_readers_scheduler_is_tested_and_decides(scene: Any) -> None:
    page = scene(0)
    page.js("$('mine').click()")
    page.wait("$('why').textContent.includes('still open: exercise 5.2')")
    page.js("$('ours').click()")
    page.wait("!page.run.error && page.run.frames.length > 10")
    assert "NotImplementedError" in page.js("localStorage.getItem(STORED)")
    page.js("$('code').value = $('code').value.replace('self.running[-1]', 'self.running[0]'); $('code').oninput()")
    page.wait("page.run.events.some(e => e.type == 'preempted' && e.request == 'A')")
    page.js("$('test').click()")
    page.wait("$('tests').children.length > 8")
    said = page.js("$('tests').textContent")
    counted = re.match(r"(\d+) of (\d+) tests pass\.", said)
    assert counted and 0 < int(counted[1]) < int(counted[2]) and "but got {1: 1}" in said


# --- the second floor ------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(live: Page) -> Any:
    """fleet(number) -> the page as it opens on a scene of the second floor, the question answered."""

    def opened(number: int) -> Page:
        live.js("document.querySelectorAll('#floors button')[1].click()")
        live.js(f"document.querySelectorAll('nav button')[{number}].click()")
        assert live.js("$('totals').hidden && $('play').disabled && page.tick === 0")
        drawn = "[...document.querySelectorAll('#line path:not(.rule)')].map(path => path.getBBox())"
        assert live.js(f"Math.max(...{drawn}.map(box => box.x + box.width)) < LEFT + page.cell + 0.1")
        live.js("document.querySelectorAll('.answers button')[page.scene.right].click(); stop()")
        return live

    yield opened
    live.js("document.querySelector('#floors button').click()")
    assert live.console == []


@needs_chromium
def test_the_load_is_dragged_the_router_is_picked_and_figures_follow(fleet: Any) -> None:
    page = fleet(0)
    before = page.js("page.run.totals")
    drag = "(i => { for (const n of %s) { i.value = n; i.oninput(); } })(document.querySelector('[aria-label=%s]'))"
    asked = page.js("asked")
    page.js(drag % ([245, 240, 235, 230, 225, 220, 215, 210, 205, 200], '"requests per second"'))
    slower = settled(page)
    assert slower["requests"] < before["requests"] and page.js("page.setup.rate") == 200
    assert page.js("asked") - asked <= 3  # a drag asks as often as there is an answer, not as often as it moves
    page.js("(s => { s.value = 'two-choices'; s.onchange(); })(document.querySelector('select'))")
    balanced = settled(page)
    assert balanced["cached"] < slower["cached"] and balanced["p99"] > slower["p99"]
    assert f"p99 {balanced['p99']} ms (before: {before['p99']})" in page.js("$('totals').textContent")
    assert "drawn were" in page.js("show(30), $('why').textContent")
    assert page.js("document.activeElement.tagName") == "SELECT"
    page.press("ArrowRight")  # chooses in the list, and moves no time
    assert page.js("page.tick") == 30


@needs_chromium
def test_whoever_is_killed_is_gone_from_that_moment_and_may_live_again(fleet: Any) -> None:
    page = fleet(1)
    page.js("show(20); $('replicas').querySelectorAll('button')[0].focus()")
    page.press("Enter")
    page.wait("page.run.totals.resent > 0")
    assert page.js("page.setup.deaths") == [[210, 0]] and page.js("page.tick") == 21
    assert page.js("page.run.frames[20].replicas[0] && !page.run.frames[21].replicas[0]")
    assert "Replica 0 dies." in page.js("$('why').textContent") and page.js("$('replicas').textContent").startswith(
        "nobody yet"
    )
    page.js("document.activeElement.blur()")
    page.press("ArrowLeft")
    assert page.js("page.tick") == 20 and "replica 0" in page.js("$('replicas').textContent")
    page.js("play()")
    page.js("$('deaths').querySelector('button').click()")
    page.wait("page.run.totals.resent === 0 && page.timer !== null")  # a fleet plays on
    assert page.js("stop(), page.setup.deaths") == []


@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_on_a_telephone_nothing_runs_out_of_the_page_also_without_python(tmp_path: Path, dark: bool) -> None:
    path = tmp_path / build.NAME
    path.write_text(build.page({}), encoding="utf-8")
    with browser(tmp_path) as page:
        page.look(390, 844, dark)
        page.open(path.as_uri())
        assert "built without Python" in page.js("$('python').textContent")
        for floor, scenes in enumerate((build.scenes(), build.fleets())):
            page.js(f"document.querySelectorAll('#floors button')[{floor}].click()")
            for number in range(len(scenes)):
                page.js(f"document.querySelectorAll('nav button')[{number}].click()")
                page.js("document.querySelector('.answers button').click(); stop(); show(9)")
                assert page.js("document.documentElement.scrollWidth") <= 390
                assert page.js("$('why').children.length") > 0
                assert page.js(OVERFLOWING) == []
        assert page.js("$('own').hidden && $('knobs').disabled && $('people').disabled")
        assert page.console == []
