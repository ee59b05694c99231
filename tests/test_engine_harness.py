"""How the engine's benchmarks start processes, take turns and write down what comes back."""

import argparse
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import ours, speed
from benchmarks.engine.__main__ import parse
from benchmarks.lib import harness
from benchmarks.lib.harness import Comparison, Contender, Figure, Showcase, metric
from benchmarks.lib.process import Engine, Parts
from nanovllm import __version__


def options_of(out: Path, **changes: Any) -> argparse.Namespace:
    given = {"out": out, "device": "cpu", "rounds": 2, **changes}
    told = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    options = parse(["latency", "--quick", *told])
    options.model = harness.EMBEDDED_MODEL
    return options


def tiny_showcase(measure: Callable[[Contender], dict[str, Any]], *names: str) -> Showcase:
    spec = {"package": "nanovllm", "options": {"device": "cpu", "max_model_len": 64}, "variant": None, "path": None}
    figure = Figure("speed", "speed", "tokens/s", "higher", metric("s", "speed"))
    contenders = [Contender(name, spec) for name in names]
    return Showcase("tiny", "", "", contenders, [figure], run=lambda contender, options: measure(contender))


def answer(*speeds: float) -> dict[str, Any]:
    facts = {"device": "cpu", "processor": "p", "threads": 1, "torch": "2", "transformers": "5", "clock": "wall"}
    repetitions = [{"s": {"speed": speed}} for speed in speeds]
    return {"pid": 1, "engine": "e 1.0", "ready_seconds": 2.0, "facts": facts, "repetitions": repetitions}


def test_contenders_take_turns_and_every_repetition_counts(tmp_path: Path) -> None:
    called: list[str] = []

    def measure(contender: Contender) -> dict[str, Any]:
        called.append(contender.name)
        return answer(10.0 * len(called), 10.0 * len(called) + 1)

    result = Comparison(tiny_showcase(measure, "a", "b"), options_of(tmp_path)).run()
    assert called == ["a", "b", "b", "a"]
    [figure] = result["figures"]
    assert figure["values"]["a"] == {"median": 25.5, "min": 10.0, "max": 41.0}
    assert len(result["rounds"]) == 8 and {r["round"] for r in result["rounds"]} == {0, 1, 2, 3}
    assert result["engines"]["b"]["ready_s"] == [2.0, 2.0]
    assert json.loads((tmp_path / "tiny.json").read_text()) == json.loads(json.dumps(result))


def test_a_run_that_is_cut_short_keeps_its_rounds(tmp_path: Path) -> None:
    def measure(contender: Contender) -> dict[str, Any]:
        if (tmp_path / "tiny.json").is_file():
            raise KeyboardInterrupt
        return answer(1.0)

    with pytest.raises(KeyboardInterrupt):
        Comparison(tiny_showcase(measure, "a", "b"), options_of(tmp_path)).run()
    assert [r["contender"] for r in json.loads((tmp_path / "tiny.json").read_text())["rounds"]] == ["a"]


def test_one_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    def measure(contender: Contender) -> dict[str, Any]:
        if contender.name == "b":
            raise RuntimeError("b failed: no such kernel")
        return answer(1.0)

    comparison = Comparison(tiny_showcase(measure, "a", "b", "c"), options_of(tmp_path))
    result = comparison.run()
    assert result["figures"][0]["values"].keys() == {"a", "c"}
    assert result["failures"] == {"b": "b failed: no such kernel"} == comparison.failures


def test_the_commit_can_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_COMMIT", "abc")
    result = Comparison(tiny_showcase(lambda _: answer(1.0), "a"), options_of(tmp_path)).run()
    assert result["commit"] == {"hash": "abc", "modified": False}


def test_a_gpu_is_needed_unless_it_is_a_quick_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="measures a GPU"):
        parse(["latency", "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="at least 1"):
        options_of(tmp_path, rounds=0)


FAKE_VLLM = """
from types import SimpleNamespace
__version__ = "9.9"
class SamplingParams:
    def __init__(self, temperature, ignore_eos, max_tokens):
        self.max_tokens = max_tokens
class LLM:
    def __init__(self, model, **options):
        assert options == {"skip_tokenizer_init": True, "max_model_len": 256}, options
    def generate(self, prompts, params, use_tqdm):
        assert all(p["prompt_token_ids"] for p in prompts)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * p.max_tokens)]) for p in params]
"""


@pytest.mark.slow
def test_vllm_is_measured_by_the_same_code_and_its_packages_stay_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes. What would break nanovllm if it saw it lies beside a vLLM that answers at once."""
    site = tmp_path / "site"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text(FAKE_VLLM)
    (site / "xxhash.py").write_text("raise ImportError('this one is for vLLM alone')")
    options = options_of(tmp_path, rounds=1, repeats=1, vllm_path=str(site))
    monkeypatch.setattr(speed, "QUICK_SMALL", {"batches": [1], "prompt_len": 4, "num_tokens": 3, "highest_id": 500})
    monkeypatch.delenv("PYTHONPATH", raising=False)
    result = Comparison(speed.latency(options), options).run()
    assert result["failures"] == {}
    assert {name: e["engine"] for name, e in result["engines"].items()} == {
        "nanovllm": f"nanovllm {__version__}",
        "vLLM": "vllm 9.9",
    }
    assert len({r["pid"] for r in result["rounds"]}) == 2


@pytest.mark.parametrize(
    ("program", "limit", "words"),
    [
        ("echo 'ValueError: no such model' >&2; exit 3", 60, r"exit 3(.|\n)*no such model"),
        ("sleep 60", 0.3, "gave up after 0.3 s"),
    ],
)
def test_a_process_that_fails_or_hangs_leaves_its_last_words(
    program: str, limit: float, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(harness, "PROCESS_SECONDS", limit)
    with pytest.raises(RuntimeError, match=f"nanovllm failed(.|\n)*{words}"):
        harness.run_process(ours(options_of(tmp_path)), speed.measure_small, {}, options_of(tmp_path))


def test_wrong_numbers_of_tokens_are_no_result() -> None:
    engine = Engine.__new__(Engine)
    engine.make_params = dict
    output = argparse.Namespace(outputs=[argparse.Namespace(token_ids=[1, 2])])
    engine.llm = argparse.Namespace(generate=lambda *_, **__: [output])
    with pytest.raises(RuntimeError, match="wrong number of tokens"):
        engine.generate([[1]], [3])
    assert engine.generate([[1]], [2]) == [output]


def test_the_parts_of_a_start_are_told_by_its_log() -> None:
    """Each from a line at its end; what lies between two lines has a name, too."""
    parts = Parts(imported=100.0)
    for name, seconds, created in [
        ("weights", 2.0, 103.0),
        ("measuring memory", 1.0, 104.25),
        ("compilation", 5.0, 110.0),
        ("rehearsal", 0.5, 110.5),
        ("recording", 1.0, 111.625),
    ]:
        record = logging.LogRecord("nanovllm.startup", logging.INFO, "", 0, "%s %f", (name, seconds), None)
        record.created = created
        parts.handle(record)
    assert parts.seconds == {
        "configuration": 1.0, "weights": 2.0, "rest of the kernels' imports": 0.25, "measuring memory": 1.0,
        "KV cache": 0.875, "compilation": 5.0, "the rest": 0.0, "rehearsal": 0.5, "recording": 1.0,
    }  # fmt: skip
