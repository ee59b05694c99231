"""Kernels are compiled by other processes before a start launches them. Whatever happens there, the start goes on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
SCENES = [
    "usual",
    "launching",
    "shared",
    "nothing",
    "thread",
    "two_starts",
    "wrong",
    "killed",
    "beheaded",
    "elsewhere",
    "launchers",
    "no_process",
    "given_up",
]
pytestmark = pytest.mark.slow


def run(cache: Path, *scenes: str) -> "subprocess.CompletedProcess[str]":
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TQDM_DISABLE": "1"}
    command = [sys.executable, "-m", "tests.kernels.precompiled", *scenes]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


def found(cache: Path, *scenes: str) -> dict[str, Any]:
    """What `tests/kernels/precompiled.py` finds, in a process of its own without Triton's interpreter. Of a part of a
    scene: the number of launches, what this process compiled, and what it asked other processes for."""
    done = run(cache, *scenes)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found(tmp_path_factory.mktemp("triton"), *SCENES)


def test_what_was_compiled_beforehand_is_found(scenes: dict[str, Any]) -> None:
    """A variant is asked for once, and compiled here only if nobody asked for it."""
    assert scenes["usual"]["beforehand"] == [0, [], ["doubling"] * 2]
    assert scenes["usual"]["afterwards"] == [3, ["doubling"], []]


def test_launches_end_with_the_first_variant_that_is_missing(scenes: dict[str, Any]) -> None:
    """What a later kernel reads would not have been written. Where nothing is missing, all are launched."""
    assert scenes["launching"] == {
        "some are missing": [1, [], ["doubling"]], "missing": 1, "none is missing": [2, [], []], "still missing": 0,
    }  # fmt: skip


def test_hashes_are_those_of_the_process_that_launches(scenes: dict[str, Any]) -> None:
    """Triton's depend on the kernels that were used before."""
    assert scenes["shared"]["afterwards"] == [1, [], []]


def test_the_modules_are_those_of_the_process_that_launches(scenes: dict[str, Any]) -> None:
    """Not those of the directory in which it was started."""
    assert scenes["elsewhere"]["afterwards"] == [1, [], []]


def test_what_launches_is_compiled_once_for_each_types_of_arguments(scenes: dict[str, Any]) -> None:
    """As Triton 3.6 wants it."""
    assert scenes["launchers"]["made"] == ["doubling [131072]", "filling [16]"]


def test_without_launches_nothing_is_compiled_either(scenes: dict[str, Any]) -> None:
    assert scenes["nothing"] == {"beforehand": [0, [], []], "afterwards": [1, ["doubling"], []]}


def test_other_threads_launch_as_ever(scenes: dict[str, Any]) -> None:
    assert scenes["thread"]["beforehand"] == [1, ["doubling"], []]


def test_a_start_that_waited_for_another_leaves_other_threads_alone(scenes: dict[str, Any]) -> None:
    """The first to start serves while the second still compiles."""
    assert scenes["two_starts"]["meanwhile"] == [1, ["doubling"], []]


def test_a_wrong_kernel_is_an_error_when_it_is_launched(scenes: dict[str, Any]) -> None:
    assert scenes["wrong"]["afterwards"] == [1, [], []]
    assert "no such size" in scenes["wrong"]["error"]


def test_a_start_survives_the_processes_that_compile(scenes: dict[str, Any]) -> None:
    """A process that compiles is killed, or the one that forks them, or there is none: the launch compiles."""
    assert scenes["killed"]["afterwards"] == [1, ["doubling"], []]
    assert scenes["beheaded"]["gone"] and scenes["beheaded"]["afterwards"][0] == 1
    assert scenes["no_process"]["afterwards"] == [2, ["doubling"] * 2, []]


def test_a_start_that_fails_leaves_no_process(scenes: dict[str, Any]) -> None:
    assert scenes["given_up"] == {"gone": True, "afterwards": [1, ["doubling"], []]}


def test_a_start_that_is_killed_leaves_no_process_for_long(tmp_path: Path) -> None:
    """What is being compiled is finished. Nothing else is begun."""
    done = run(tmp_path, "abandoned")  # until no process holds its stderr any longer
    assert done.returncode == -signal.SIGKILL
    assert 1 <= len(list(tmp_path.glob("*/doubling.json"))) < 20


def test_an_engine_compiles_nothing_when_it_launches(tmp_path: Path) -> None:
    """A cold start asks for all that it launches, with the same keys; a warm start asks for nothing."""
    cold, warm = (found(tmp_path, "engine")["engine"] for _ in range(2))
    (launches, here, asked), (again, here_again, asked_again) = cold["start"], warm["start"]
    assert len(asked) == cold["variants"] == warm["variants"] > 20
    assert here == here_again == asked_again == []
    assert launches == again > 100
