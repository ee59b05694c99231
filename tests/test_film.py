"""The film shows what the recording says at every time, and asks for nothing else."""

import base64
import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stages.core import SamplingParams, Sequence
from stages.stage_3_paged_blocks import slots_of
from tests.test_lecture_browser import CHROMIUM, shown
from tests.tiny_recording import tiny
from tools.pictures.decode_profile import busy_us, load_recording
from tools.race import film
from tools.race.replay import DEFAULT, EngineShow
from tools.race.workload import EngineRun, load_race

NODE = shutil.which("node")
TIMES = [0.0, 0.05, 0.6, 1.3, 1.95, 3.0, 2.0, 30.0]  # back once


@pytest.fixture(scope="module")
def runs() -> list[EngineRun]:
    return load_race(DEFAULT)


@pytest.fixture(scope="module")
def page(runs: list[EngineRun]) -> str:
    return film.film(runs)


def packed(page: str) -> str:
    [data] = re.findall(r'<script type="text/plain" id="packed">(.*?)</script>', page)
    return str(data)


def said_by_script(page: str, expression: str) -> Any:
    """The value of a JavaScript expression in terms of `data`, as the page unpacks it."""
    assert NODE is not None
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    ask = f"unpack({json.dumps(packed(page))}).then(data => console.log(JSON.stringify({expression})))"
    done = subprocess.run([NODE, "-"], input=f"{script}\n{ask}", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(NODE is None, reason="there is no node on this machine")
def test_at_every_time_it_shows_what_the_replay_shows(page: str, runs: list[EngineRun]) -> None:
    state = "({status: s.status, table: s.table, text: s.tokens.map(es => es.map(e => e.text).join(''))})"
    each = f"{json.dumps(TIMES)}.map(t => {{ const s = at(t); return JSON.stringify({state}); }})"
    found = said_by_script(page, f"data.runs.map(run => {{ const at = engineAt(run); return {each}; }})")
    for run, states in zip(runs, found, strict=True):
        show = EngineShow(run)
        first = run.events[0]["t"]
        for t, text in zip(TIMES, states, strict=True):
            show.seek(t + first)
            seen, view = json.loads(text), show.view
            known = len(view.state.status)
            assert seen["status"][:known] == view.state.status and set(seen["status"][known:]) <= {"absent"}
            assert {i: table for i, table in enumerate(seen["table"]) if table} == view.state.tables
            assert seen["text"] == [request.text for request in view.requests]


def test_the_page_asks_for_nothing_and_is_the_same_for_the_same_race(page: str, runs: list[EngineRun]) -> None:
    assert page == film.film(runs) and len(page) < 200_000
    assert not re.search(
        r"https?:|//\w+\.|@import|url\(|fetch\(|XMLHttpRequest|WebSocket", page.replace(packed(page), "")
    )
    assert "{{" not in page
    data = json.loads(gzip.decompress(base64.b64decode(packed(page))))
    assert [run["title"] for run in data["runs"]] == [run.title for run in runs] and data["shown"] == 4


@pytest.mark.skipif(NODE is None, reason="there is no node on this machine")
def test_a_step_slowed_down_is_the_recorded_one() -> None:
    page = film.launches()
    assert not re.search(r"https?:|//\w+\.|@import|url\(|fetch\(", page.replace(packed(page), "")) and "{{" not in page
    counted = "[run.name, run.orders.length, busyUntil(run.tracks.gpu, run.duration)]"
    recording = load_recording()
    assert recording is not None
    said = said_by_script(page, f"prepared(data).runs.map(run => {counted})")
    for (name, orders, busy), (stage, recorded) in zip(said, recording["stages"].items(), strict=True):
        assert name == stage and 1e6 * busy == pytest.approx(busy_us(recorded["events"], "gpu"), rel=1e-3)
        launches = sum(track == "launch" and "Launch" in call for track, call, *_ in recorded["events"])
        assert launches <= orders < launches + 20


@pytest.mark.skipif(NODE is None, reason="there is no node on this machine")
def test_tokens_laid_end_to_end_are_where_stage_3_puts_them() -> None:
    page = film.one_step()
    assert not re.search(r"https?:|//\w+\.|@import|url\(|fetch\(", page.replace(packed(page), "")) and "{{" not in page
    data, laid = said_by_script(page, "[data, laidOut(data.right, data.block_size)]")
    expected = []
    for number, part in enumerate(data["right"]["parts"]):
        known = list(range(len(part["tokens"])))
        seq = Sequence(number, known, len(known), SamplingParams(), seed=0, block_table=part["table"])
        slots = slots_of(seq, part["computed"], part["end"], data["block_size"])
        expected += [(number, part["tokens"][part["computed"] + i], slot) for i, slot in enumerate(slots)]
    assert [(t["request"], t["text"], t["slot"]) for t in laid] == expected and len(expected) == 5
    assert data["right"]["parts"] == data["wrong"]["parts"]
    words = [[top[0][0] for top in data[run]["top"]] for run in ("right", "wrong")]
    assert words[0][0] == " dormouse" and words[1][0] == " raccoon" and words[0][1:] == words[1][1:]
    assert data["right"]["parts"][0]["table"][0] == 0, "slot 0 is the first request's"


def test_an_engine_that_did_not_take_part_is_refused() -> None:
    with pytest.raises(ValueError, match="stage_5 did not take part in the race; there are stage_4"):
        film.film([tiny()])


def test_the_program_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "race.html"
    film.main(["--out", str(out)])
    assert capsys.readouterr().out == f"{out}\n" and out.stat().st_size > 50_000
    with pytest.raises(SystemExit, match="holds no recording"):
        film.main(["--recording", str(tmp_path)])


PLAYED = """
<script>addEventListener("load", () => setTimeout(() => {
  const press = key => dispatchEvent(new KeyboardEvent("keydown", {key}));
  const said = () => [document.querySelector("output").textContent, document.getElementById("who").textContent,
    document.documentElement.scrollWidth > innerWidth ? "over" : "fits"].join("; ");
  const all = [];
  for (const key of ["End", "1", "Home", "ArrowRight", "ArrowRight", "ArrowLeft", "5"]) {
    press(key);
    all.push(said());
  }
  parent.postMessage(all.join(" | "), "*");
}, 1500))</script></body>
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 390])
def test_keys_in_a_browser(width: int, page: str, tmp_path: Path) -> None:
    said = shown(page, PLAYED, tmp_path, width, "frame.html")
    end, first, home, step, second, back, fifth = re.sub(r".*<body>|</body>.*", "", said, flags=re.DOTALL).split(" | ")
    assert end == "20.95 s; 5 Continuous batching: 0 running, 24 finished, 0 of 36 blocks in use; fits"
    assert first == "20.95 s; 1 Naive generation: 0 running, 24 finished, no blocks to show; fits"
    assert home.startswith("0.00 s; 1 Naive") and back == step != second
    assert "5 Continuous" in fifth and all(part.endswith("fits") for part in (home, step, second, back, fifth))


BROKEN = """
<script>addEventListener("load", () => setTimeout(() => {
  const lit = () => document.querySelectorAll(".lit").length;
  const said = () => document.getElementById("changed").textContent;
  const all = [said()];
  document.querySelector(".token").dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
  all.push(lit());
  document.getElementById("break").click();
  all.push(said(), document.querySelectorAll(".wrong").length, document.documentElement.scrollWidth > innerWidth);
  parent.postMessage(all.join(" | "), "*");
}, 1000))</script></body>
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_token_lights_its_slot_and_its_mask_and_a_switch_breaks_the_step(width: int, tmp_path: Path) -> None:
    said = re.sub(
        r".*<body>|</body>.*", "", shown(film.one_step(), BROKEN, tmp_path, width, "frame.html"), flags=re.DOTALL
    )
    before, lit, after, wrong, over = said.split(" | ")
    assert before == "" and lit == "3" and wrong == "2" and over == "false"
    assert after.endswith("A writes “raccoon” in place of “dormouse”.")
