"""Python in the browser decides as CPython does; and what a reader can do with the page, done in Chromium."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler_page.browser import CHROMIUM, Browser
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


@pytest.fixture(scope="module")
def runtime() -> dict[str, bytes]:
    if not pyodide.is_sound(pyodide.archive()):
        if shutil.which("npm") is None:
            pytest.skip("there is no npm on this machine, and so no Pyodide")
        pytest.fail(f"{pyodide.archive()} is missing: run `make pyodide` once (it needs the network)", pytrace=False)
    return pyodide.files()


@pytest.mark.skipif(NODE is None, reason="there is no node on this machine")
def test_under_node_the_events_are_those_of_cpython(runtime: dict[str, bytes], tmp_path: Path) -> None:
    scenes = build.scenes()
    questions = [{"do": "play", "setup": {k: v for k, v in scene.items() if k != "run"}} for scene in scenes]
    files = runtime | {"sources.zip": build.sources(), "questions.json": json.dumps(questions).encode()}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert NODE is not None
    done = subprocess.run([NODE, "-e", IN_NODE], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads((tmp_path / "answers.json").read_text())
    recorded = json.loads(json.dumps([scene["run"] for scene in scenes]))
    assert sum(len(answer["events"]) for answer in answers) > 400
    assert [answer["events"] for answer in answers] == [run["events"] for run in recorded]
    assert answers == recorded


# --- in Chromium -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(runtime: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The page with Python running in it."""
    directory = tmp_path_factory.mktemp("page")
    path = directory / build.NAME
    path.write_text(build.page(runtime), encoding="utf-8")
    with Browser(path, directory / "profile") as browser:
        browser.wait(
            "document.readyState == 'complete' && (page.python || $('python').textContent.includes('not start'))", 240
        )
        yield browser


@pytest.fixture
def scene(live: Browser) -> Any:
    """scene(number) -> the page as it opens on a scene, the question answered."""

    def opened(number: int) -> Browser:
        live.value(f"$('mine').checked && $('mine').click(); document.querySelectorAll('nav button')[{number}].click()")
        live.value("document.querySelector('.answers button').click(); stop()")
        return live

    yield opened
    assert live.complaints == []


def requests(browser: Browser) -> dict[str, Any]:
    return {request["name"]: request for request in browser.value("page.setup.requests")}


def settled(browser: Browser) -> dict[str, Any]:
    """The totals of the run, when every change has been answered."""
    browser.value("change()")
    totals: dict[str, Any] = browser.value("page.run.totals")
    return totals


def middle(browser: Browser, selector: str) -> tuple[float, float]:
    box = browser.value(f"(box => [box.x + box.width / 2, box.y + box.height / 2])"
                        f"(document.querySelector({selector!r}).getBoundingClientRect())")  # fmt: skip
    return box[0], box[1]


@needs_chromium
def test_in_chromium_the_events_are_those_of_cpython(live: Browser) -> None:
    recorded = json.loads(json.dumps([scene["run"] for scene in build.scenes()]))
    asked = "SCENES.map(({run, ...setup}) => ask({do: 'play', setup}))"
    assert live.value(f"Promise.all({asked})") == recorded
    said = live.value("$('python').textContent")
    events = sum(len(run["events"]) for run in recorded)
    assert re.search(rf"in Python 3\.\d+\.\d+, which started in [\d.]+ s and gives the same {events} events", said), (
        said
    )


@needs_chromium
def test_nobody_sees_the_future_before_a_guess(live: Browser) -> None:
    live.value("document.querySelectorAll('nav button')[1].click()")
    hidden = "[$('play').disabled, $('totals').hidden, document.querySelectorAll('rect.decode').length]"
    assert live.value(hidden) == [True, True, 0]
    live.value("document.querySelectorAll('.answers button')[2].click(); stop()")
    assert live.value(hidden)[:2] == [False, False] and live.value(hidden)[2] > 20
    assert live.value("document.querySelector('#question .good').textContent") == "Right. "


@needs_chromium
def test_requests_are_dragged_onto_the_time_line_and_along_it(scene: Any) -> None:
    browser = scene(0)
    before = settled(browser)
    x, y = middle(browser, "[data-flag=C]")
    cell = browser.value("page.cell")
    browser.drag((x, y), (x + 3 * cell, y), (x + 7 * cell, y))
    assert requests(browser)["C"]["arrival"] == 8
    assert settled(browser)["first"]["C"] >= 1 and settled(browser) != before
    browser.value("document.querySelector('#tray').scrollIntoView({block: 'end'})")
    chip, line = middle(browser, "#tray button"), middle(browser, "#line")
    browser.drag(chip, (line[0], line[1] + 30), line)
    added = requests(browser)["E"]
    assert added["output"] == 8 and added["arrival"] == browser.value(f"tickAt({line[0]})") > 3
    assert settled(browser)["tokens"] == 48 + added["output"]
    browser.value("document.querySelector('#requests tr:last-child button').click()")
    assert set(requests(browser)) == set("ABCD")


@needs_chromium
def test_the_keyboard_does_what_the_pointer_does(scene: Any) -> None:
    browser = scene(0)
    browser.value("document.activeElement.blur()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    browser.press("ArrowLeft")
    assert browser.value("page.tick") == 1
    browser.value("document.querySelector('[data-flag=B]').focus()")
    for _ in range(3):
        browser.press("ArrowRight")
    assert requests(browser)["B"]["arrival"] == 3 and browser.value("page.tick") == 1
    settled(browser)
    assert browser.value("document.activeElement.getAttribute('data-flag')") == "B"
    browser.press("Delete")
    assert set(requests(browser)) == set("ACD")
    browser.value("document.querySelector('#tray button').focus()")
    browser.press("Enter")
    assert requests(browser)["B"]["arrival"] == 1 and settled(browser)["first"].keys() == set("ABCD")


@needs_chromium
def test_knobs_change_the_run_and_refusals_are_told(scene: Any) -> None:
    browser = scene(0)
    turn = "(key, value) => { const i = $('sliders').querySelectorAll('input')[key]; i.value = value; i.oninput(); }"
    browser.value(f"({turn})(0, 40)")
    assert settled(browser)["preemptions"] == 0
    browser.value("$('sliders').querySelectorAll('input')[6].click()")
    assert settled(browser)["steps"] > 12 and browser.value("page.setup.static")
    browser.value(f"({turn})(0, 2)")
    settled(browser)
    assert "is refused" in browser.value("$('why').textContent")
    assert "page.setup" and browser.value("$('totals').textContent").count("(before: ") >= 2


@needs_chromium
def test_the_readers_scheduler_is_tested_and_decides(scene: Any) -> None:
    browser = scene(0)
    browser.value("$('mine').click()")
    browser.wait("$('why').textContent.includes('still open: exercise 5.2')")
    browser.value("$('ours').click()")
    browser.wait("!page.run.error && page.run.frames.length > 10")
    assert "NotImplementedError" in browser.value("localStorage.getItem(STORED)")
    browser.value(
        "$('code').value = $('code').value.replace('self.running[-1]', 'self.running[0]'); $('code').oninput()"
    )
    browser.wait("page.run.events.some(e => e.type == 'preempted' && e.request == 'A')")
    browser.value("$('test').click()")
    browser.wait("$('tests').children.length > 8")
    said = browser.value("$('tests').textContent")
    counted = re.match(r"(\d+) of (\d+) tests pass\.", said)
    assert counted and 0 < int(counted[1]) < int(counted[2]) and "but got {1: 1}" in said


@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_on_a_telephone_nothing_runs_out_of_the_page_also_without_python(tmp_path: Path, dark: bool) -> None:
    path = tmp_path / build.NAME
    path.write_text(build.page({}), encoding="utf-8")
    with Browser(path, tmp_path / "profile", width=390, height=844, dark=dark) as browser:
        browser.wait("document.readyState == 'complete'")
        assert "built without Python" in browser.value("$('python').textContent")
        for number in range(len(build.scenes())):
            browser.value(f"document.querySelectorAll('nav button')[{number}].click()")
            browser.value("document.querySelector('.answers button').click(); stop(); show(9)")
            assert browser.value("document.documentElement.scrollWidth") <= 390
            assert browser.value("$('why').children.length") > 0
        assert browser.value("$('own').hidden && $('knobs').disabled && $('people').disabled")
        assert browser.complaints == []
