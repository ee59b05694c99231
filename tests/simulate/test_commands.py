"""`nanovllm simulate` and `nanovllm plan`, as a user calls them."""

import json
import sys
from pathlib import Path

import pytest

from nanovllm.cli import main
from nanovllm.simulate.options import seconds
from nanovllm.simulate.plan import Planner

SMALL = ["--card", "h200", "--rate", "200", "--prompt-tokens", "uniform:50,400", "--output-tokens", "30"]
SIMULATE = ["simulate", "Qwen3-0.6B", *SMALL, "--queries", "60"]


def test_a_simulation_is_told_as_a_table_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    options = ["--replicas", "2", "--router", "prefix", "--router-kwargs", '{"imbalanced_threshold": 8}']
    options += ["--shared-prefix", "512", "--max-num-batched-tokens", "2048", "--no-async-scheduling"]
    options += ["--target-first", "200ms", "--json", str(out)]
    assert main([*SIMULATE, *options]) == 0
    said = capsys.readouterr().out
    assert "60 of 60 finished" in said and "first token within 200 ms" in said
    told = json.loads(out.read_text())
    assert told["queries"]["finished"] == 60 and told["tokens"]["output"] == 1800
    assert told["tokens"]["cached_share"] > 0.5
    engine = told["scenario"]["engine"]
    assert engine["max_num_batched_tokens"] == 2048 and engine["async_scheduling"] is False
    assert engine["kvcache_block_size"] == 256 and engine["num_kv_blocks"] > 100
    assert told["scenario"]["ray"] == {
        "num_replicas": 2,
        "request_router_config": {
            "request_router_class": "ray.serve.llm.request_router.PrefixCacheAffinityRouter",
            "request_router_kwargs": {"imbalanced_threshold": 8, "match_rate_threshold": 0.1, "do_eviction": True},
        },
    }


@pytest.mark.slow
def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.svg"
    assert main([*SIMULATE, "--target-first", "5ms", "--plot", str(picture)]) == 0
    assert "<svg" in picture.read_text() and picture.stat().st_size > 10_000


def test_a_plan_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    options = ["--target-first", "100ms", "--target-gap", "20ms", "--seconds", "0.2", "--budgets", "2048,8192"]
    assert main(["plan", "Qwen3-0.6B", *SMALL, *options, "--ranks", "1", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "1 GPUs: 1 x tensor_parallel_size=1, max_num_batched_tokens=" in said and "(target 20)" in said
    told = json.loads(out.read_text())
    assert told["best"]["num_gpus"] == 1 and told["best"]["first"] < 0.1
    assert [other["why_not"] for other in told["others"]] == ["as many GPUs, and nearer to the limit"]
    assert told["scenario"]["ray"]["num_replicas"] == 1


def test_a_plan_says_what_it_did_not_try(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    options = ["--target-first", "1", "--seconds", "0.2", "--budgets", "8192", "--ranks", "1,8", "--json", str(out)]
    assert main(["plan", "Qwen3-0.6B", *SMALL, *options]) == 0
    assert "not tried: tensor_parallel_size=8: sums over so many ranks were not measured" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["not_tried"]) == 1


@pytest.mark.parametrize(("rate", "expected"), [("20", 30.0), ("3", 100.0)])
def test_a_plan_simulates_enough_queries(rate: str, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float | None] = []

    def find(planner: Planner) -> None:
        seen.append(planner.scenario.workload.seconds)
        raise ValueError("enough")

    monkeypatch.setattr(Planner, "find", find)
    main(["plan", "Qwen3-0.6B", "--card", "h200", "--target-first", "1", "--rate", rate])
    assert seen == [expected]


def test_replicas_that_die_and_scale(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--die", "100ms:0", "--startup-seconds", "0.1", "--max-replicas", "3", "--upscale-delay-s", "0"]
    assert main([*SIMULATE, *options, "--target-ongoing-requests", "1"]) == 0
    said = capsys.readouterr().out
    assert "60 of 60 finished" in said and " 0 sent again" not in said and " 1 died" in said


def test_json_has_all_that_a_simulation_depends_on(tmp_path: Path) -> None:
    options = ["--die", "100ms:0", "--startup-seconds", "0.1", "--max-replicas", "3", "--min-replicas", "2"]
    assert main([*SIMULATE, *options, "--acceptance", "0.5", "--json", str(tmp_path / "out.json")]) == 0
    told = json.loads((tmp_path / "out.json").read_text())["scenario"]
    assert told["replicas"] == told["ray"]["autoscaling_config"]["initial_replicas"] == 2, "the least, as Ray has it"
    assert told["deaths"] == [[0.1, 0]] and told["startup_seconds"] == 0.1 and told["acceptance"] == 0.5
    assert told["autoscaling"]["max_replicas"] == 3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["simulate", "Qwen3-0.6B", "--card", "h200", "--rate", "1"], "give seconds or queries"),
        (["simulate", "Qwen3-0.6B", "--card", "h200", "--seconds", "1"], "give rate, in queries per second, or replay"),
        (["simulate", "Qwen3-0.6B", "--card", "h200", "--replay", "no.csv"], "replay='no.csv': there is no such file"),
        ([*SIMULATE, "--speed", "2"], "speed has no effect without replay; leave it out"),
        (
            ["simulate", "Qwen3-0.6B", "--card", "h200", "--replay", __file__, "--prompt-tokens", "9"],
            "prompt_tokens has no effect with replay; leave it out",
        ),
        ([*SIMULATE, "--min-replicas", "2"], "min_replicas: without max_replicas nothing is scaled"),
        ([*SIMULATE, "--replicas", "0"], "replicas must be at least 1; got 0"),
        ([*SIMULATE, "--rate", "-1"], "rate must be a positive number; got -1.0"),
        ([*SIMULATE, "--turns", "0.5"], "turns must be at least 1; got 0.5"),
        ([*SIMULATE, "--acceptance", "2"], "acceptance must be from 0 to 1; got 2.0"),
        ([*SIMULATE, "--card", "abacus"], "card='abacus' is not known; known are h200"),
        ([*SIMULATE, "--max-num-seqs", "0"], "max_num_seqs must be at least 1; got 0"),
        ([*SIMULATE, "--router-kwargs", '{"pull": 1}'], "router_kwargs of two-choices"),
        ([*SIMULATE, "--max-replicas", "2", "--min-replicas", "3"], "min_replicas=3 and max_replicas=2"),
        ([*SIMULATE, "--max-replicas", "2", "--replicas", "3"], "replicas=3 must be from min_replicas=1 to max_replic"),
        ([*SIMULATE, "--json", "/no/such/place.json"], "there is no directory /no/such"),
        (["plan", "Qwen3-0.6B", *SMALL], "a plan needs target_first or target_gap, such as --target-first 200ms"),
        (["plan", "Qwen3-0.6B", "--card", "h200", "--target-gap", "1", "--rate", "0"], "rate must be a positive"),
        (["plan", "Qwen3-0.6B", "--card", "h200", "--target-gap", "1"], "give rate, in queries per second, or replay"),
        (["plan", "Qwen3-0.6B", *SMALL, "--target-gap", "1", "--ranks", "3"], "tensor_parallel_size=3 does not fit"),
    ],
)
def test_a_mistake_gets_one_line(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert complaint in error and error.startswith("nanovllm: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value"), [("--prompt-tokens", "many"), ("--target-first", "soon"), ("--die", "3"), ("--router", "none")]
)
def test_a_value_that_is_none_is_refused_by_name(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*SIMULATE, option, value])
    assert f"argument {option}: " in capsys.readouterr().err


def test_a_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*SIMULATE, "--plot", "out.png"]) == 1
    assert "pip install 'nanovllm[notebooks]'" in capsys.readouterr().err


def test_times_of_any_unit() -> None:
    assert [seconds(text) for text in ("2", "1.5s", "200ms", "10min", "1h")] == [2, 1.5, 0.2, 600, 3600]
