"""The demo says what is true: the texts are the engine's, the picture is its state, and nothing slow is imported."""

from __future__ import annotations

import inspect
import io
import itertools
import math
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.cells import cell_len
from rich.console import Console

from nanovllm.trace_view.recording import add_texts
from stages.core import SamplingParams
from stages.manifest import load_stage, load_stages
from tools import ROOT
from tools.race import demo
from tools.race.replay import Key
from tools.race.views import EngineView
from tools.race.workload import EMBEDDED_MODEL, Workload, demo_workload, load_tokenizer
from training.grammar import generate_story

MODEL = EMBEDDED_MODEL
STAGES = [stage for stage in load_stages() if stage.number not in demo.NEEDS_A_GPU]


def workload_of(tokenizer: Any, lengths: tuple[int, ...]) -> Workload:
    return demo_workload(lambda text: tokenizer.encode(text).ids, lengths)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(MODEL)


def console(width: int = 100, **options: Any) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, highlight=False, **options), out


def test_a_story_is_printed_whole_and_wrapped_between_words(tokenizer: Any) -> None:
    text = generate_story(random.Random(0), held_out=True).text + '\n\n"안녕하세요!" 🎈 naïve.\nTomás'
    screen, out = console(width=40)
    teller = demo.StoryTeller(screen, tokenizer.decode)
    for token in tokenizer.encode(text).ids:
        teller.on_event({"type": "token", "ids": [token]})
    teller.end(cut_off=False)
    assert out.getvalue().split() == text.split()
    assert max(map(cell_len, out.getvalue().splitlines())) <= 40
    assert out.getvalue().count("\n\n") == text.count("\n\n") + 1


def test_every_stage_tells_a_story_of_its_own(tokenizer: Any) -> None:
    screen, out = console()
    demo.tell_stories(screen, STAGES, tokenizer, MODEL, "cpu", 6)
    printed = out.getvalue()
    for stage in STAGES:
        prompt, params = demo.story_request(tokenizer, stage.number, 6)
        [expected] = stage.engine_class()(str(MODEL)).generate([prompt], params)
        part = printed.split(f"Stage {stage.number}: {stage.title}")[1].split("What still hurts")[0]
        story = tokenizer.decode(prompt + expected)
        assert " ".join(story.split()) in " ".join(part.split())
        assert "tokens/s" in part


def test_the_race_runs_every_stage_on_the_same_requests(tokenizer: Any) -> None:
    workload = workload_of(tokenizer, (3, 9, 4, 2))
    assert workload.prompts[0] == workload.prompts[1] != workload.prompts[2]
    screen, out = console()
    demo.compare(screen, STAGES, workload, MODEL, "cpu")
    for stage in STAGES:
        [line] = [line for line in out.getvalue().splitlines() if f"{stage.number} {stage.title}" in line]
        assert "yes" in line and "×" in line
    assert "NO" not in out.getvalue()


def test_the_race_tells_when_a_stage_changes_the_text(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Constant:
        def __init__(self, stage: Any, *_: Any, **__: Any) -> None:
            self.token = 5 if stage.number < 3 else 6

        def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
            return [[self.token] * p.max_tokens for p in params]

    monkeypatch.setattr(demo, "build", Constant)
    screen, out = console()
    demo.compare(screen, STAGES[:3], workload_of(tokenizer, (2, 3)), MODEL, "cpu")
    assert [line.split()[-2] for line in out.getvalue().splitlines() if "×" in line] == ["yes", "yes", "NO"]


def test_the_stages_of_the_race_have_the_same_memory(tokenizer: Any) -> None:
    workload = workload_of(tokenizer, (30, 8, 8))
    longest = len(workload.prompts[0]) + 30
    options = [replace(workload, kv_slots=4 * longest).scenario.limits(stage) for stage in STAGES]
    assert options[0] == {} and options[1] == {"max_num_seqs": 4}
    assert all(o == {"num_blocks": 4 * longest // 16, "block_size": 16, "max_num_seqs": 16} for o in options[2:])


def test_the_view_follows_the_engine(tokenizer: Any) -> None:
    """In every step the picture shows what the engine's own queues and pool say."""
    stage = load_stage(5)
    workload = workload_of(tokenizer, (20, 30, 10, 12))
    view, with_text = EngineView(workload, 16), add_texts(tokenizer.decode)
    seen: set[str] = set()

    def on_event(event: dict[str, Any]) -> None:
        if event["type"] == "scheduled":  # all that this step takes, preempts and admits has been told by now
            tables = {seq.request: seq.block_table for seq in engine.scheduler.running}
            assert view.state.tables == tables
            running = [i for i, status in enumerate(view.state.status) if status == "running"]
            assert running == sorted(tables)
            counts = engine.pool.ref_counts
            cells = view.block_map().plain.split()
            assert [cell in "·°" for cell in cells] == [n == 0 for n in counts]
            named = set(engine.pool.block_by_digest.values())
            assert all(cells[block] == "°" for block in named if view.keeps and counts[block] == 0)
            assert [cell == "*" for cell in cells] == [n > 1 for n in counts]
            seen.update(cells)
        view.on_event(with_text(event))

    engine = demo.build(stage, MODEL, "cpu", on_event, {"num_blocks": 16, "block_size": 16})
    outputs = demo.generate(engine, workload)
    assert {"A", "*", "°"} <= seen
    assert [request.ids for request in view.requests] == outputs
    assert [request.text for request in view.requests] == [tokenizer.decode(ids) for ids in outputs]
    assert set(view.state.status) == {"finished"} and not view.state.tables
    assert view.preemptions > 0
    assert view.generated == sum(map(len, outputs))


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow), 5])
def test_one_stage_live(number: int, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal the picture moves; into a file one is printed while requests still run."""
    monkeypatch.setattr(demo, "LIVE_LENGTHS", (4, 9, 3, 2))
    monkeypatch.setattr(demo, "LASTS", 0.5)
    for terminal in (False, True):
        screen, out = console(force_terminal=terminal)
        demo.show(screen, load_stage(number), tokenizer, MODEL, "cpu")
        assert "4 requests, 18 tokens in" in out.getvalue()
        assert out.getvalue().count("counters") == 1 or terminal
        assert ("\x1b[" in out.getvalue()) == terminal
    assert out.getvalue().count("counters") > 3


def test_a_learner_s_stage_is_shown_once_it_is_whole(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = type("Learner", (), {})
    monkeypatch.setattr(demo.mine, "require_right", Mock(side_effect=SystemExit("not right yet")))
    with pytest.raises(SystemExit, match="not right yet"):
        demo.main(["--stage", "5", "--impl", "exercises"])
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(demo.mine, "engine_class", lambda stage, impl: learner)
    with pytest.raises(TypeError, match="Learner"):
        demo.build(load_stage(5), MODEL, "cpu", lambda event: None, {}, "exercises")
    with pytest.raises(SystemExit):
        demo.main(["--impl", "exercises"])
    assert "needs --stage N" in capsys.readouterr().err


class Slow:
    """In the place of a stage: a token every few milliseconds, for ever or until it fails."""

    def __init__(self, on_event: Any, fails_at: float = math.inf) -> None:
        self.on_event, self.fails_at = on_event, fails_at

    def generate(self, prompts: list[list[int]], params: Any) -> list[list[int]]:
        for step in itertools.count(1):
            if step > self.fails_at:
                raise RuntimeError("no room for a KV block")
            for event in (
                {"type": "scheduled", "tokens": 1, "cached": step},
                {"type": "token", "ids": [5]},
            ):
                self.on_event({"t": time.perf_counter(), "step": step, "request": 0} | event)
            time.sleep(0.002)
        raise AssertionError


def test_a_live_show_is_stopped_turned_back_and_left(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the engine goes on; whoever leaves ends it, too."""
    workload = workload_of(tokenizer, (30,))
    live = demo.LiveShow(load_stage(5), workload, 16, add_texts(tokenizer.decode))
    keys: dict[int, Key] = {10: "pause", 11: "back", 12: "back", 14: "quit"}
    seen: list[tuple[float, int]] = []

    def wait(seconds: float) -> Key | None:
        time.sleep(0.004)
        seen.append((player.position(), live.view.step))
        return keys.get(len(seen))

    player = demo.Player(live, speed=1000.0)
    with live.running(Slow(live.on_event)) as thread:
        assert not player.play(console(force_terminal=True)[0], wait)
        assert thread.is_alive()
    assert not thread.is_alive() and live.over
    paused, back, twice, there = seen[10:]
    assert live.events[-1]["step"] > paused[1] > 3
    assert back[1] == paused[1] - 1 and twice[1] == paused[1] - 2 and there == twice and back[0] < paused[0]


@pytest.mark.parametrize(("impl", "whose"), [("stages", "Stage 5: "), ("exercises", "Your stage 5: ")])
def test_a_live_show_says_whose_stage_is_at_work(tokenizer: Any, impl: str, whose: str) -> None:
    live = demo.LiveShow(load_stage(5), workload_of(tokenizer, (30,)), 16, add_texts(tokenizer.decode), impl)
    assert str(live.heading).startswith(whose)


def test_what_a_stage_raises_ends_the_show(tokenizer: Any) -> None:
    live = demo.LiveShow(load_stage(5), workload_of(tokenizer, (30,)), 16, add_texts(tokenizer.decode))
    with pytest.raises(RuntimeError, match="no room"), live.running(Slow(live.on_event, fails_at=2)):
        assert demo.Player(live).play(console(force_terminal=True)[0], time.sleep)
    assert live.view.generated == 2


def test_the_view_of_stage_6_counts_replays_and_their_padding(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "LIVE_LENGTHS", (4, 9, 5))
    screen, out = console()
    demo.show(screen, load_stage(6), tokenizer, MODEL, "cpu")
    said = " ".join(out.getvalue().split())
    # A prompt in step 1; then 3 steps of three in the bucket of four, 1 of two, and 4 of one
    assert "8 of the steps were replays, in recordings for 1, 2, 4, 8, 16 sequences." in said
    assert "gains nothing" in said
    found = re.search(r"steps replayed ([0-9]+), ([0-9]+) of ([0-9]+) rows padding", said)
    assert found is not None
    steps, padding, rows = map(int, found.groups())
    assert 0 < steps == padding and rows == 4 * steps


def test_stage_7_says_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """In the first line, before torch is there to be asked; so it is held here to what the stage does."""
    parameters = inspect.signature(load_stage(7).engine_class()).parameters
    assert parameters["tensor_parallel_size"].default == demo.RANKS
    monkeypatch.setattr(demo, "show", lambda *_: None)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    for number, where in ((5, "on one CPU thread, float32"), (7, "on 2 ranks, each on one CPU thread, float32")):
        demo.main(["--stage", str(number)])
        assert capsys.readouterr().out.startswith(f"nanovllm, qwen3, 8 layers of 256, {where}\n")


def test_an_elective_is_shown_on_a_model_of_its_kind(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(demo, "LIVE_LENGTHS", (2, 5, 3))
    demo.main(["--elective", "moe"])
    said = capsys.readouterr().out
    assert said.startswith("nanovllm, qwen3_moe, 6 layers of 192, on one CPU thread, float32\n")
    assert "Elective moe: Mixture of experts." in said and "3 requests, 10 tokens in" in said
    with pytest.raises(SystemExit, match="there is no elective 'fp7'; there are moe"):
        demo.main(["--elective", "fp7"])


def test_an_elective_says_with_what_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def build(*arguments: Any) -> Any:
        built.append(original(*arguments))
        return built[-1]

    original = demo.build
    monkeypatch.setattr(demo, "build", build)
    monkeypatch.setattr(demo, "LIVE_LENGTHS", (2, 3))
    demo.main(["--elective", "windows"])
    assert built[0].windows == (32,) * 8


def test_nothing_slow_is_imported(tmp_path: Path) -> None:
    script = (
        "import sys; from tools.race import demo; demo.LIVE_LENGTHS = (2, 2); demo.main(['--stage', '4']); "
        "slow = {'transformers', 'matplotlib', 'pandas'} & sys.modules.keys(); assert not slow, slow"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("nanovllm, qwen3, 8 layers")


def test_a_directory_without_tokenizer_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"there is no tokenizer\.json in it"):
        demo.main(["--model", str(tmp_path)])
