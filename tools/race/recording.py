"""A recording: how one engine ran the race, as a gzipped file with a JSON object a line.

The lines are those of a trace (`nanovllm/trace_view/recording.py`), so that `gunzip -c` makes one that `nanovllm trace
view` can show. The header says more: on which machine, of which code, on which workload. Times count from the start of
the race, and a `token` event carries the text that it adds, so that nothing but this file is needed to show it.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from nanovllm.trace_view.page import with_texts
from nanovllm.trace_view.recording import FORMAT as TRACE_FORMAT
from nanovllm.trace_view.recording import NEEDED
from tools.race.workload import BLOCK_SIZE, NANOVLLM, Workload

VERSION = 1
SUFFIX = ".jsonl.gz"
DETAILS = {"scheduled": ("tokens", "cached"), "token": ("ids", "text"), "blocks": ("taken", "shared", "freed")}
Event = dict[str, Any]


@dataclass(frozen=True)
class Recording:
    """What a file holds. `about` is what all engines of one race have in common."""

    engine: str  # "stage_4" or "nanovllm"
    title: str
    seconds: float  # from the start of the race to this engine's last token
    block_size: int
    num_blocks: int  # 0: it has no blocks
    about: About
    events: list[Event]

    @property
    def tokens(self) -> list[list[int]]:
        """The generated token ids of every request."""
        tokens: list[list[int]] = [[] for _ in self.about.workload.prompts]
        for event in self.events:
            if event["type"] == "token":
                tokens[event["request"]] += event["ids"]
        return tokens

    @property
    def filename(self) -> str:
        return self.engine + SUFFIX


@dataclass(frozen=True)
class About:
    made: str  # ISO date
    machine: dict[str, Any]  # `benchmarks.lib.process.facts`
    commit: dict[str, Any]
    model: str
    together: bool  # all engines at once, sharing the machine
    workload: Workload

    @property
    def card(self) -> str:
        """What computed: the GPU, or the CPU by its name."""
        on_cpu = self.machine["device"] == "cpu"
        return str(self.machine["processor"] if on_cpu else self.machine["device"])

    @property
    def source(self) -> str:
        return f"{self.card}, {self.made}, commit {self.commit['hash']}{' with changes' * self.commit['modified']}"


def record(
    engine: str, title: str, result: dict[str, Any], about: About, decode: Callable[[list[int]], str]
) -> Recording:
    """From what `tools.race.worker` says of a run."""
    events = with_texts(result["events"], decode)
    uses_blocks = any(event["type"] == "blocks" for event in events)
    num_blocks = about.workload.num_blocks if uses_blocks else 0
    return Recording(engine, title, result["seconds"], BLOCK_SIZE, num_blocks, about, events)


def save(recording: Recording, directory: Path) -> Path:
    """Write the file, whole or not at all. The same recording gives the same bytes."""
    header = {"nanovllm_trace": TRACE_FORMAT, "nanovllm_recording": VERSION, "num_events": len(recording.events)}
    header |= {f.name: getattr(recording, f.name) for f in fields(Recording) if f.name not in ("about", "events")}
    lines = [header | asdict(recording.about), *recording.events]
    text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
    path = directory / recording.filename
    directory.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".part")
    half.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))
    half.replace(path)
    return path


def load(path: Path) -> Recording:
    """Raises ValueError, in one line that names the file, for one that is missing, damaged or of another version."""
    try:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    except OSError as error:
        if path.is_file() and not isinstance(error, gzip.BadGzipFile):
            raise
        reason = "is no gzip file, or damaged" if path.is_file() else "does not exist"
        raise ValueError(f"{path} {reason}; write it again with make record") from None
    except (EOFError, zlib.error, UnicodeDecodeError):
        raise ValueError(f"{path} is cut short or damaged; write it again with make record") from None
    try:
        header, *events = map(json.loads, lines)
        version = header["nanovllm_recording"]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is no recording of the race; write one with make record") from None
    if version != VERSION:
        raise ValueError(f"{path} has format {version}, and this code reads format {VERSION}; use a matching checkout")
    try:
        return from_lines(header, events)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); write it again with make record") from None


def from_lines(header: dict[str, Any], events: list[Event]) -> Recording:
    if len(events) != header["num_events"]:
        raise ValueError(f"{len(events)} events instead of {header['num_events']}")
    for number, event in enumerate(events, start=2):
        if missing := [name for name in (*NEEDED, *DETAILS.get(event["type"], ())) if name not in event]:
            raise ValueError(f"line {number} has no {missing[0]}")
    about = {f.name: header[f.name] for f in fields(About)}
    about["workload"] = Workload(**about["workload"])
    own = {f.name: header[f.name] for f in fields(Recording) if f.name not in ("about", "events")}
    return Recording(**own, about=About(**about), events=events)


def load_race(directory: Path) -> list[Recording]:
    """All recordings of a directory, in the order of the ladder. Raises ValueError if there are none, or if they do not
    belong together."""
    paths = sorted(directory.glob(f"*{SUFFIX}"), key=lambda path: (path.name.startswith(NANOVLLM), path.name))
    if not paths:
        raise ValueError(f"{directory} holds no recording; make one with make record")
    recordings = [load(path) for path in paths]
    first = recordings[0].about
    for path, recording in zip(paths, recordings, strict=True):
        if recording.about != first:
            raise ValueError(f"{path} is not of the same race as {paths[0].name}; record them together")
    return recordings
