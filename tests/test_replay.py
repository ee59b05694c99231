"""A replay shows what is in the file and nothing else, at the time at which it happened, and says what it is."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.tiny_recording import tiny
from tools import ROOT
from tools.race import replay
from tools.race.replay import EngineShow, RaceShow, Show
from tools.race.views import EngineView
from tools.race.workload import EMBEDDED_MODEL, EngineRun, choose_engines, load_race, load_tokenizer

CPU = replay.SHIPPED / "cpu"


@pytest.fixture(scope="module")
def shipped() -> list[EngineRun]:
    return load_race(CPU)


def drawn(show: Show, t: float, width: int = 80, height: int = 24) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(show.render(t, width, height))
    return out.getvalue()


def concluded(show: Show) -> str:
    out = io.StringIO()
    show.conclude(Console(file=out, width=120, highlight=False))
    return out.getvalue()


def test_a_long_queue_pushes_no_other_out(shipped: list[EngineRun]) -> None:
    [naive] = [r for r in shipped if r.engine == "stage_1"]
    for width in (80, 120):
        seen = drawn(EngineShow(naive), naive.seconds / 3, width, 24)
        assert all(f"│ {queue}" in seen for queue in ("running", "waiting", "finished"))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--engine", "9"], "--engine 9: .* has nanovllm, stage_1"),
        (["--speed", "0"], "--speed must be a positive number"),
        (["--speed", "nan"], "--speed must be a positive number"),
        (["--from", "1000"], "--from must be from 0 to"),
    ],
)
def test_a_wrong_option_is_said_in_one_line(options: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit, match=complaint):
        replay.main(["--recording", str(CPU), *options])


# --- what ships ------------------------------------------------------------------------------------------------------


def test_the_run_on_a_gpu_has_all_of_its_tokens() -> None:
    """In half precision, where stories may part company at a near-tie."""
    recordings = load_race(replay.SHIPPED / "h200")
    assert [r.engine for r in recordings] == choose_engines(None, on_gpu=True)
    assert recordings[0].race.model == "the story model in Qwen3-0.6B's shape"
    assert recordings[0].race.workload == load_race(CPU)[0].race.workload
    assert sum(path.stat().st_size for path in (replay.SHIPPED / "h200").iterdir()) < 300_000
    wanted = recordings[0].race.workload.max_tokens
    assert all([len(tokens) for tokens in r.tokens] == wanted for r in recordings)
    assert all("NVIDIA" in r.race.source for r in recordings)


def test_every_engine_is_there_with_all_of_its_tokens(shipped: list[EngineRun]) -> None:
    assert [r.engine for r in shipped] == [*(f"stage_{n}" for n in range(1, 6)), "nanovllm"]
    assert sum(path.stat().st_size for path in CPU.iterdir()) < 300_000
    wanted = shipped[0].race.workload.max_tokens
    for recording in shipped:
        assert [len(tokens) for tokens in recording.tokens] == wanted
        assert recording.tokens == shipped[0].tokens  # greedy, float32: every engine tells the same stories
        times = [e["t"] for e in recording.events]
        assert times == sorted(times) and times[0] >= 0 and times[-1] <= recording.seconds


def test_its_texts_are_those_of_its_tokens(shipped: list[EngineRun]) -> None:
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    for recording in shipped:
        show = EngineShow(recording)
        show.seek(show.duration)
        assert [request.text for request in show.view.requests] == [
            tokenizer.decode(tokens) for tokens in recording.tokens
        ]


def test_the_engines_end_with_nothing_left_over(shipped: list[EngineRun]) -> None:
    for recording in shipped:
        show = EngineShow(recording)
        show.seek(show.duration)
        assert show.view.generated == recording.race.workload.num_tokens
        assert set(show.view.state.status) == {"finished"} and not show.view.state.tables
        assert [request.ids for request in show.view.requests] == recording.tokens
        assert f"{recording.race.workload.num_tokens} tokens in {recording.seconds:.2f} s" in concluded(show)


def test_the_table_has_the_figures_of_the_files(shipped: list[EngineRun]) -> None:
    lines = [line.split() for line in concluded(RaceShow(shipped)).splitlines() if re.match(r" *\d ", line)]
    order = sorted(shipped, key=lambda r: r.seconds)
    assert len(lines) == len(order)
    for place, (line, recording) in enumerate(zip(lines, order, strict=True), start=1):
        title = recording.title.split()
        num_tokens, slowest = recording.race.workload.num_tokens, order[-1].seconds
        first: dict[int, float] = {}
        for e in recording.events:
            if e["type"] == "token":
                first.setdefault(e["request"], e["t"])
        assert line[: 1 + len(title)] == [str(place), *title]
        assert line[1 + len(title) :] == [
            f"{recording.seconds:.2f}", f"{num_tokens / recording.seconds:,.0f}",
            f"{sum(first.values()) / len(first):.2f}", "s", f"{slowest / recording.seconds:.1f}×",
            str(len(first)), "of", str(len(first)),
        ]  # fmt: skip


# --- the picture -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_every_picture_fits_and_says_that_it_is_a_recording(width: int, shipped: list[EngineRun]) -> None:
    race = shipped[0].race
    shows: list[Show] = [RaceShow(shipped), *map(EngineShow, shipped)]
    for show in shows:
        for part in (0.0, 0.3, 1.0):
            lines = drawn(show, part * show.duration, width, 22).splitlines()
            assert lines[0].strip().startswith(f"RECORDING  {race.card}, {race.made}")
            assert len(lines) <= 22 and max(map(cell_len, lines)) <= width
            assert "…" not in "".join(line for line in lines if "/" not in line), "a figure is cut off"


def test_lanes_show_what_had_been_generated_by_then(shipped: list[EngineRun]) -> None:
    show = RaceShow(shipped)
    for t in (0.0, 0.5, 1.0, 2.5, 7.0, show.duration):
        picture = drawn(show, t)
        for recording in shipped:
            [line] = [line for line in picture.splitlines() if recording.title in line]
            so_far = sum(len(e["ids"]) for e in recording.events if e["type"] == "token" and e["t"] <= t)
            done = sum(e["type"] == "finished" and e["t"] <= t for e in recording.events)
            assert f" {so_far}/{recording.race.workload.num_tokens} " in line
            assert f" {done}/{len(recording.tokens)} " in line
            assert line.endswith(f" {min(t, recording.seconds):.2f}")


def test_a_late_token_does_not_turn_back_the_step() -> None:
    """With asynchronous scheduling a step is planned before the tokens of the one before it are there."""
    recording = tiny()
    events = recording.events
    late = [*events[:5], events[6], events[5], *events[7:]]
    view = EngineView(recording.race.workload, recording.num_blocks)
    steps = []
    for e in late:
        view.on_event(e)
        steps.append(view.step)
    assert steps == sorted(steps) and [request.text for request in view.requests] == ["once upon é", "”once"]


# --- time ------------------------------------------------------------------------------------------------------------


class Spectator:
    """A clock that moves only while somebody waits, a show that notes when it was drawn, and keys at given waits."""

    def __init__(self, show: Show, keys: dict[int, replay.Key] | None = None) -> None:
        self.show, self.keys = show, keys or {}
        self.duration, self.stops, self.over = show.duration, show.stops, show.over
        self.now, self.waits = 100.0, 0
        self.frames: list[tuple[float, float]] = []  # (seconds since the beginning, time shown)

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> replay.Key | None:
        self.now += seconds
        self.waits += 1
        return self.keys.get(self.waits)

    def render(self, t: float, width: int, height: int) -> Any:
        self.frames.append((self.now - 100.0, t))
        return self.show.render(t, width, height)

    def conclude(self, console: Console) -> None:
        self.show.conclude(console)

    def play(self, **options: float) -> bool:
        console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
        seen: Any = self
        return replay.Player(seen, clock=self.clock, **options).play(console, self.wait)


@pytest.mark.parametrize(("speed", "start"), [(1.0, 0.0), (2.0, 0.0), (0.5, 0.3)])
def test_it_takes_as_long_as_it_took(speed: float, start: float) -> None:
    seen = Spectator(RaceShow([tiny(), tiny("nanovllm", "nanovllm", 0.5)]))
    assert seen.play(speed=speed, start=start)
    for real, shown in seen.frames[:-1]:
        assert shown == pytest.approx(start + real * speed)
    end, shown = seen.frames[-1]
    assert shown == 0.65 and 0 <= end - (0.65 - start) / speed <= replay.FRAME


def test_one_engine_is_slowed_down_until_eyes_can_follow(shipped: list[EngineRun]) -> None:
    for show in map(EngineShow, shipped):
        assert 18 < show.duration / show.speed < 22
    assert RaceShow(shipped).speed == EngineShow(tiny(slower=100)).speed == 1


def test_texts_that_differ_are_explained() -> None:
    other = tiny("nanovllm", "nanovllm")
    events = [event | {"ids": [9] * len(event["ids"])} if event["type"] == "token" else event for event in other.events]
    said = concluded(RaceShow([tiny(), replace(other, events=events)]))
    assert "0 of 2" in said and "In 16 bits" in said
    assert "rounding" not in concluded(RaceShow([tiny()]))


def test_they_come_in_as_they_did() -> None:
    show = RaceShow([tiny(), tiny("nanovllm", "nanovllm", 0.5)])
    assert "#1" not in drawn(show, 0.32)
    assert re.search(r"#1 +nanovllm", drawn(show, 0.33)) and "#2" not in drawn(show, 0.6)
    assert re.search(r"#2 +4 Prefix", drawn(show, 0.65))


def test_keys_stop_it_and_take_it_step_by_step() -> None:
    keys: dict[int, replay.Key] = {2: "pause", 5: "on", 6: "on", 7: "back", 8: "pause", 9: "quit"}
    show = EngineShow(tiny())
    assert show.stops == [0.1, 0.3, 0.5]
    seen = Spectator(show, keys)
    assert not seen.play()
    times = [t for _, t in seen.frames]
    stopped = pytest.approx(2 * replay.FRAME)
    assert times[:2] == [0.0, pytest.approx(replay.FRAME)]
    assert times[2:5] == [stopped] * 3
    assert times[5:8] == [0.3, 0.5, 0.3] and times[8] == pytest.approx(0.3)
    assert show.view.step == 2 and show.view.generated == 2, "a step back shows what was then"


def test_stopped_at_the_end_it_stays() -> None:
    seen = Spectator(EngineShow(tiny()), {1: "on", 2: "on", 3: "on", 4: "on", 9: "pause"})
    assert seen.play() and seen.waits == 9


def test_bytes_from_a_terminal_are_keys() -> None:
    assert [replay.KEYS[b] for b in (b" ", b"q", b"\x1b[C", b"\x1bOC", b"\x1b[D")] == [
        "pause",
        "quit",
        "on",
        "on",
        "back",
    ]


def test_without_torch_and_at_once() -> None:
    script = (
        "import sys, time; from tools.race import replay; replay.main(['--once']); replay.main(['--engine', '4']); "
        "assert not {'torch', 'tokenizers', 'transformers'} & sys.modules.keys(); assert time.process_time() < 1.0"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("RECORDING") == 2 and done.stdout.count("24 of 24") == 6
    assert "same text: the same tokens as 1 Naive generation" in done.stdout and "rounding" not in done.stdout
