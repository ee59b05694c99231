"""The race is fair and says what it is: one workload, one memory, one at a time, each in a lane of its own."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stages.manifest import load_stage
from tests import fake_engine
from tools.race import race, replay
from tools.race.views import Lane, Moment, draw_bar, draw_lanes
from tools.race.workload import (
    EMBEDDED_MODEL,
    Workload,
    choose_engines,
    engine_titles,
    load_race,
    load_tokenizer,
    race_workload,
)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return race_workload(encode, 3, 2, seed=0)


def encode(text: str) -> list[int]:
    ids: list[int] = load_tokenizer(EMBEDDED_MODEL).encode(text).ids
    return ids


def screen(**options: Any) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=80, height=24, highlight=False, **options), out


# --- the workload ----------------------------------------------------------------------------------------------------


def test_two_in_three_share_a_beginning_and_few_are_long() -> None:
    made = race_workload(str.split, 24, 10, seed=1)  # type: ignore[arg-type]  # words will do for tokens
    shared = [prompt for i, prompt in enumerate(made.prompts) if i % 3 != 2]
    assert len({tuple(prompt[:60]) for prompt in shared}) == 1 and len({tuple(prompt) for prompt in shared}) == 16
    others = {tuple(prompt[:10]) for i, prompt in enumerate(made.prompts) if i % 3 == 2}
    assert len(others) == 8 and tuple(shared[0][:10]) not in others
    assert [i for i, n in enumerate(made.max_tokens) if n == 60] == [1, 6, 11, 16, 21]
    assert all(5 <= n <= 10 for n in made.max_tokens if n != 60)
    longest = max(request.length for request in made.scenario.calls[0])
    assert made.kv_slots % 16 == 0 and 0 <= made.kv_slots - 3 * longest < 3 * 16


def test_a_workload_is_a_function_of_its_seed() -> None:
    first, again, other = (race_workload(str.split, 6, 4, seed) for seed in (3, 3, 4))  # type: ignore[arg-type]
    assert first == again != other
    for requests, tokens in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            race_workload(encode, requests, tokens, 0)


def test_who_takes_part() -> None:
    assert choose_engines(None, on_gpu=False) == [*(f"stage_{n}" for n in range(1, 6)), "nanovllm"]
    assert choose_engines(None, on_gpu=True) == [*(f"stage_{n}" for n in range(1, 7)), "nanovllm"]
    assert choose_engines(["nanovllm", "7", "stage_2"], on_gpu=False) == ["stage_2", "stage_7", "nanovllm"]
    with pytest.raises(ValueError, match="--stages: there is no stage_9; there are stage_1"):
        choose_engines(["1", "9"], on_gpu=False)


def test_all_have_the_same_memory(workload: Workload) -> None:
    assert workload.scenario.limits(load_stage(1)) == {}
    assert workload.scenario.limits(load_stage(2)) == {"max_num_seqs": 3}
    for number in (3, 4, 5):
        assert workload.scenario.limits(load_stage(number)) == {
            "num_blocks": workload.kv_slots // 16, "block_size": 16, "max_num_seqs": 16,
        }  # fmt: skip


# --- the lanes -------------------------------------------------------------------------------------------------------


def test_how_a_lane_stands() -> None:
    lane = Lane("stage_1", "1 Naive", 40, 4, [Moment(i / 10, i, i // 10) for i in range(1, 41)])
    assert lane.at(0.0)[:3] == (0, 0, 0.0)
    assert lane.at(0.5) == (5, 0, pytest.approx(10), pytest.approx(10), 0.5)
    lane.moments[20:] = [Moment(2 + i / 20, 20 + i, 2) for i in range(1, 21)]  # from here on twice as fast
    assert lane.at(3.0) == (40, 2, pytest.approx(20), pytest.approx(40 / 3), 3.0)
    lane.seconds = 3.2
    assert lane.at(3.1).now == pytest.approx(18) and lane.at(9.0) == (40, 2, 0.0, 40 / 3.2, 3.2)


def test_a_ghost_is_drawn_at_the_same_time_as_the_one_that_runs() -> None:
    titles = {"stage_1": "1 Naive", "stage_2": "2 Cache", "nanovllm": "nanovllm"}
    old, young, next_one = (Lane(engine, title, 40, 2) for engine, title in titles.items())
    old.finish([{"type": "token", "t": float(i), "ids": [0]} for i in range(1, 41)], 40.0)
    old.mark, young.mark, young.moments = "ghost", "live", [Moment(4.0, 20, 1)]
    console, out = screen()
    console.print(draw_lanes([old, young, next_one], 4.5, 80))
    ghost, live, waiting = [line.split() for line in out.getvalue().splitlines()[1:] if line.strip()]
    assert ghost[0] == "ghost" and ghost[-5:] == ["4/40", "1", "1", "0/2", "4.50"]
    assert live[0] == "live" and live[-5:] == ["20/40", "20", "4", "1/2", "4.50"]
    assert waiting[0] == "nanovllm" and len(waiting) == 2, "nothing is said of one that has not begun"
    assert "▒" in ghost[3] and "█" not in ghost[3] and "█" in live[3]


def test_a_bar_grows_by_parts_of_a_character() -> None:
    bars = [draw_bar(i / 160, 20, "red", ghost=False).plain for i in range(161)]
    assert len(set(bars)) == 161 and {len(bar) for bar in bars} == {20}
    assert bars[0] == "·" * 20 and bars[80] == "█" * 10 + "·" * 10 and bars[160] == "█" * 20
    assert draw_bar(0.5, 20, "red", ghost=True).plain == "▒" * 10 + "·" * 10


# --- the race --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "work", fake_engine.work)
    monkeypatch.setattr(race, "HOLD", 0.0)


def options_of(arguments: list[str]) -> Any:
    parser = race.argparse.ArgumentParser()
    race.add_options(parser)
    return parser.parse_args(arguments)


def held(arguments: list[str], console: Console) -> dict[str, Any]:
    return race.race(options_of(["--requests", "3", "--tokens", "2", *arguments]), console)[1]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("terminal", [False, True])
def test_one_at_a_time_or_together(together: bool, terminal: bool, fake: None) -> None:
    console, out = screen(force_terminal=terminal)
    results = held(["--stages", "1", "2", "nanovllm", *["--together"] * together], console)
    spans = sorted((r["machine"]["began"], r["machine"]["ended"]) for r in results.values())
    overlaps = [later[0] < earlier[1] for earlier, later in pairwise(spans)]
    assert overlaps == [together] * 2
    text = out.getvalue()
    assert ("All at once on" in text) == together == ("in each other's way" in text)
    assert ("A ghost ran before" in text) != together
    assert ("\x1b[" in text) == terminal and ("is running" in text) != together
    assert (text.count("tokens in 0.") == 3) or terminal
    assert text.count("3 of 3") >= 3 and all(engine_titles()[engine] in text for engine in results)


def test_who_has_finished_is_gone_before_the_next_one_starts(fake: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a process takes seconds of a core, which the next one would miss."""
    running: list[race.Racer] = []
    go = race.Racer.go

    def watched(self: race.Racer) -> None:
        assert not any(racer.process.is_alive() for racer in running)
        running.append(self)
        go(self)

    monkeypatch.setattr(race.Racer, "go", watched)
    held(["--stages", "1", "2", "nanovllm"], screen()[0])
    assert len(running) == 3


def test_the_table_counts_texts_that_differ(fake: None) -> None:
    console, out = screen()
    held(["--stages", "1", "5"], console)
    [line] = [line for line in out.getvalue().splitlines() if "5 Continuous" in line and "×" in line]
    assert line.split()[-3:] == ["0", "of", "3"]


def test_an_engine_that_fails_is_named_and_the_others_are_ended(fake: None, capsys: pytest.CaptureFixture[str]) -> None:
    started: list[race.Racer] = []
    real = race.Racer.__init__

    def watched(self: race.Racer, *args: Any) -> None:
        real(self, *args)
        started.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race.Racer, "__init__", watched)
        with pytest.raises(SystemExit, match=r"^3 Paged blocks failed: ValueError: no room for a KV block$"):
            race.main(["--stages", "1", "3", "nanovllm", "--requests", "2"])
    assert len(started) == 3 and not any(racer.process.is_alive() for racer in started)


def test_a_race_is_kept_as_it_was(
    fake: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOVLLM_COMMIT", "abc")
    options = "--record --requests 4 --tokens 2 --stages 2 nanovllm --out".split()
    race.main([*options, str(tmp_path)])
    said = capsys.readouterr().out
    assert f"2 recordings of {sum(p.stat().st_size for p in tmp_path.iterdir()) / 1000:.0f} kB" in said
    first, second = load_race(tmp_path)
    assert (first.engine, second.engine) == ("stage_2", "nanovllm") and first.title == engine_titles()["stage_2"]
    assert first.race.commit == {"hash": "abc", "modified": False} and first.race.model == "assets/story_model"
    assert first.race.machine["clock"] == "cpu", "on one CPU thread its own time is kept, as in the benchmarks"
    assert [len(tokens) for tokens in first.tokens] == first.race.workload.max_tokens
    replay.main(["--recording", str(tmp_path)])
    assert "RECORDING  none, 20" in capsys.readouterr().out


def test_an_engine_whose_process_ends_is_named(fake: None) -> None:
    with pytest.raises(RuntimeError, match=r"^4 Prefix caching failed: without a word$"):
        held(["--stages", "1", "4"], screen()[0])


def test_a_real_engine_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").symlink_to(EMBEDDED_MODEL / "tokenizer.json")
    monkeypatch.setattr(race, "describe_model", lambda *_: "no model")
    with pytest.raises(RuntimeError, match=r"^1 Naive generation failed: \w+Error: .*config.json"):
        held(["--stages", "1", "--model", str(tmp_path)], screen()[0])


@pytest.mark.parametrize("options", [["--together"], ["--stages", "7", "1"]])
def test_several_processes_are_timed_by_the_wall(options: list[str]) -> None:
    assert race.clock_for(options_of(options)) == "wall"
    assert race.clock_for(options_of([])) == "cpu"
    assert race.clock_for(options_of(["--device", "cuda"])) == "wall"
