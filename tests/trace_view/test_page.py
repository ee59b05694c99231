"""The page: it needs nothing else, its data cannot break out of it, and its picture of every step is the engine's."""

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nanovllm.trace_view import Recording, page
from stages.core import Event
from tests.trace_view.runs import crowded
from tools.pictures.timeline import read_events

NODE = shutil.which("node")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_node = pytest.mark.skipif(NODE is None, reason="there is no node on this machine")


class Parts(html.parser.HTMLParser):
    """What the browser would see: addresses that it would load, ids, scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.addresses += [values[name] for name in ("src", "href", "action", "data") if name in values]
        self.ids += [values["id"]] if "id" in values else []
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


def script_says(text: str, expression: str) -> Any:
    """The value of a JavaScript expression in terms of `trace`, the data as the page's own script reads it."""
    data, script = Parts(text).scripts
    assert NODE is not None
    program = f"{script}\nconst trace = {data};\nconsole.log(JSON.stringify({expression}));"
    done = subprocess.run([NODE, "-"], input=program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_page_loads_nothing() -> None:
    text = page(crowded())
    assert Parts(text).addresses == ["data:,"]
    assert not re.search(
        r"https?:|//\w|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|sendBeacon", text.split("{", 1)[1]
    )


def test_the_script_finds_all_that_it_asks_for() -> None:
    parts = Parts(page(crowded()))
    asked = set(re.findall(r'(?:\$|getElementById)\("([\w-]+)"\)', parts.scripts[1]))
    assert asked and asked <= set(parts.ids)
    assert len(set(parts.ids)) == len(parts.ids)


def test_the_data_is_in_the_page_and_cannot_leave_its_element() -> None:
    evil = "</script><script>alert(1)</script><!-- {{trace}}"
    events = [event | {"request": evil} for event in crowded().events]
    scripts = Parts(page(Recording(events, title=evil))).scripts
    assert len(scripts) == 2
    data = json.loads(scripts[0])
    assert data["about"] == {"title": evil} and data["names"] == [evil + "′" * i for i in range(12)]


def test_half_a_character_waits_for_its_other_half() -> None:
    pieces = {1: b"caf", 2: b"\xc3", 3: b"\xa9", 4: b"!"}
    events = [{"t": 0.0, "step": 0, "type": "added", "request": 0, "prompt_tokens": 1}]
    events += [{"t": 0.0, "step": i, "type": "token", "request": 0, "ids": [i]} for i in pieces]
    data = Parts(
        page(Recording(events), lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace"))
    ).scripts[0]
    assert [event["text"] for event in json.loads(data)["events"][1:]] == ["caf", "", "é", "!"]


SHOWN = """trace.steps.map(({step}, i) => {
  const s = stateAt(trace, i);
  return {step, table: s.table, status: s.status, share: [...s.share],
    tokens: s.tokens.map((t, i) => [i, t.length])};
})"""


@needs_node
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_every_step_shows_what_the_timeline_of_the_notebooks_shows(asynchronous: bool) -> None:
    """The script puts together again what was taken apart for it."""
    recording = crowded(asynchronous)
    events: list[Event] = recording.events
    timeline = read_events(events)
    text = page(recording)
    steps = script_says(text, SHOWN)
    assert [s["step"] for s in steps] == timeline.steps
    names = script_says(text, "trace.names")
    assert names == [life.request for life in timeline.lives]
    for shown, blocks in zip(steps, timeline.blocks, strict=True):
        holders: dict[int, list[int]] = {}
        for life, table in enumerate(shown["table"]):
            for block in table:
                holders.setdefault(block, []).append(life)
        assert holders == {block: sorted(lives) for block, lives in blocks.holders.items()}
        spans = {i: s for i, life in enumerate(timeline.lives) for s in life.spans if s.step == shown["step"]}
        share = {i: (s["phase"], s["tokens"], s["cached"]) for i, s in shown["share"]}
        assert share == {i: (s.phase, s.tokens, s.cached) for i, s in spans.items() if s.tokens}
        for i, span in spans.items():
            if not span.tokens and not asynchronous:  # there the last token is known one step after it was planned
                assert shown["status"][i] == {"waiting": "waiting", "idle": "running"}[span.phase]
        for i, count in shown["tokens"]:
            assert count == sum(
                e["type"] == "token" and e["step"] <= shown["step"] and e["request"] == names[i] for e in events
            )


@needs_node
def test_the_overview_counts_tokens_and_blocks() -> None:
    recording = crowded()
    rows = script_says(page(recording), "trace.steps")
    timeline = read_events(recording.events)
    assert {r["step"]: r["prefill"] + r["decode"] + r["again"] for r in rows} == timeline.tokens_in_step
    assert [r["used"] for r in rows] == [len(b.holders) for b in timeline.blocks]
    assert sum(r["again"] for r in rows) > 0


@needs_node
def test_a_second_run_of_a_stage_is_another_life() -> None:
    events = []
    for step in (1, 2):
        for type, details in (
            ("added", {"prompt_tokens": 2}),
            ("scheduled", {"tokens": 2, "cached": 0}),
            ("finished", {}),
        ):
            events.append({"t": float(step), "step": step, "type": type, "request": 0} | details)
    text = page(Recording(events))
    assert script_says(text, "trace.names") == ["0", "0′"]
    assert script_says(text, "trace.num_blocks") == 0


@needs_node
def test_wrong_guesses_give_back_only_the_end_of_a_table() -> None:
    """And with the end of a sequence goes its share of blocks that somebody else still holds, which nobody frees."""

    def event(type: str, step: int, **details: Any) -> Event:
        return {"t": 0.0, "step": step, "type": type, "request": 0} | details

    def blocks(step: int, taken: list[int], shared: list[int], freed: list[int]) -> Event:
        return event("blocks", step, taken=taken, shared=shared, freed=freed)

    events = [event("added", 0, prompt_tokens=5), event("admitted", 1, cached=2), blocks(1, [1, 2], [0], [])]
    events += [
        event("scheduled", 1, tokens=3, cached=2),
        blocks(1, [], [], [2]),
        event("scheduled", 2, tokens=1, cached=5),
    ]
    ends = [blocks(2, [], [], [1]), event("finished", 2, reason="length")]
    for end in (ends, ends[::-1]):
        text = page(Recording([*events, *end, event("scheduled", 3, tokens=1, cached=6)]))
        assert script_says(text, "trace.steps.map((_, i) => stateAt(trace, i).table[0])") == [[0, 1, 2], [0, 1], []]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_in_a_browser(tmp_path: Path, width: int) -> None:
    """The browser draws it without an error, fills every part, and the picture is no empty sheet."""
    (tmp_path / "run.html").write_text(page(crowded()), encoding="utf-8")
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--enable-logging=stderr"]
    url = (tmp_path / "run.html").as_uri() + "#step=20"
    shot = tmp_path / "shot.png"
    dom = subprocess.run([*command, "--dump-dom", url], capture_output=True, text=True, timeout=120)
    # Chromium's own pages warn where there is no network
    said = [line for line in dom.stderr.splitlines() if "CONSOLE" in line and "Slow network is detected" not in line]
    assert not said, said
    assert "Step 20, " in dom.stdout and "blocks in use" in dom.stdout
    assert re.search(r'class="chip"[^>]*>r\d', dom.stdout) and "<mark>" in dom.stdout
    subprocess.run([*command, f"--screenshot={shot}", url], capture_output=True, timeout=120, check=True)
    from matplotlib.image import imread

    image = imread(shot)  # [height, width, 3 or 4], from 0 to 1
    assert image.shape[1] == width
    colours = {tuple(round(float(c), 1) for c in pixel[:3]) for pixel in image[::6, ::6].reshape(-1, image.shape[2])}
    assert len(colours) > 12, "next to nothing was drawn"
