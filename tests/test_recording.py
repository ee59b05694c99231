"""A recording comes back from its file as it was, and a file that cannot be shown is said to be so in one line."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm.trace_view import Recording
from tests.tiny_recording import RACE, tiny
from tools.race import replay
from tools.race.workload import EngineRun, load_race


def test_a_recording_comes_back_as_it_was(tmp_path: Path) -> None:
    made = tiny()
    path = made.save(tmp_path)
    assert path == tmp_path / "stage_4.jsonl.gz" and list(tmp_path.iterdir()) == [path]
    assert EngineRun.load(path) == made
    assert made.tokens == [[7, 8, 9], [10, 7]]
    before = path.read_bytes()
    assert before[4:8] == bytes(4), "gzip's header has no date of its own"
    assert EngineRun.load(path).save(tmp_path).read_bytes() == before
    assert EngineRun.load(path).race.source == "NVIDIA H100 80GB HBM3, 2026-11-28, commit abc123"


def test_unpacked_it_is_a_trace_for_the_page(tmp_path: Path) -> None:
    made = tiny()
    unpacked = tmp_path / "run.jsonl"
    unpacked.write_bytes(gzip.decompress(made.save(tmp_path).read_bytes()))
    trace = Recording.load(unpacked)
    assert trace.events == made.events == Recording.load(made.save(tmp_path)).events
    assert (trace.about["title"], trace.about["num_blocks"], trace.about["block_size"]) == ("4 Prefix caching", 4, 16)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def drop_a_line(path: Path) -> None:
    write_lines(path, lines_of(path)[:-1])


def drop_a_field(path: Path) -> None:
    lines = lines_of(path)
    write_lines(path, [{name: value for name, value in line.items() if name != "ids"} for line in lines])


def drop_the_machine(path: Path) -> None:
    header, *events = lines_of(path)
    del header["machine"]
    write_lines(path, [header, *events])


def a_later_version(path: Path) -> None:
    header, *events = lines_of(path)
    write_lines(path, [header | {"nanovllm_recording": 2}, *events])


DAMAGE: dict[Callable[[Path], object], str] = {
    cut: "is cut short or damaged",
    flip: "damaged",
    drop_a_line: "15 events instead of 16",
    drop_a_field: "has no ids",
    drop_the_machine: "machine",
    a_later_version: "has format 2, and this code reads format 1",
    Path.unlink: "holds no recording",
    lambda path: path.write_bytes(b"plain text"): "is no gzip file",
    lambda path: path.write_bytes(gzip.compress(b"[1, 2]\n")): "is no recording with events",
    lambda path: path.write_bytes(gzip.compress(b"")): "is no recording with events",
    lambda path: Recording(tiny().events).save(path): "is no recording of the race",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_cannot_be_shown_is_said_in_one_line(damage: Callable[[Path], object], tmp_path: Path) -> None:
    damage(tiny().save(tmp_path))
    with pytest.raises(SystemExit) as refused:
        replay.main(["--recording", str(tmp_path)])
    assert DAMAGE[damage] in str(refused.value) and str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert re.search("make record$|use a matching checkout$", str(refused.value)), "there is no remedy"


def test_recordings_of_two_races_are_not_mixed(tmp_path: Path) -> None:
    tiny().save(tmp_path)
    replace(tiny("nanovllm", "nanovllm"), race=replace(RACE, made="2026-11-29")).save(tmp_path)
    with pytest.raises(ValueError, match=r"nanovllm\.jsonl\.gz is not of the same race as stage_4"):
        load_race(tmp_path)
