"""How the engines ran the race, each in a gzipped file.

The files are recordings (`nanovllm/trace_view/recording.py`), so `nanovllm trace view` can show them too. The first
line says more: on which machine, of which code, on which workload. Times count from the start of the race, and a
`token` event carries the text that it adds, so that nothing but these files is needed to show the race.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from nanovllm.trace_view.recording import Event, Recording, add_texts
from tools.race.workload import BLOCK_SIZE, NANOVLLM, Workload

VERSION = 1
SUFFIX = ".jsonl.gz"
DETAILS = {"scheduled": ("tokens", "cached"), "token": ("ids", "text"), "blocks": ("taken", "shared", "freed")}


@dataclass(frozen=True)
class Race:
    """What all engines of one race have in common."""

    made: str  # ISO date
    machine: dict[str, Any]  # `benchmarks.lib.process.facts`
    commit: dict[str, Any]
    model: str
    together: bool  # all engines at once, sharing the machine
    workload: Workload

    @property
    def card(self) -> str:
        """The name of the GPU or CPU that computed."""
        on_cpu = self.machine["device"] == "cpu"
        return str(self.machine["processor"] if on_cpu else self.machine["device"])

    @property
    def source(self) -> str:
        return f"{self.card}, {self.made}, commit {self.commit['hash']}{' with changes' * self.commit['modified']}"


@dataclass(frozen=True)
class EngineRun:
    """How one engine ran the race: what a file holds."""

    engine: str  # "stage_4" or "nanovllm"
    title: str
    seconds: float  # from the start of the race to this engine's last token
    block_size: int
    num_blocks: int  # 0: it has no blocks
    race: Race
    events: list[Event]

    @classmethod
    def from_result(
        cls, engine: str, title: str, result: dict[str, Any], race: Race, decode: Callable[[list[int]], str]
    ) -> EngineRun:
        """From the result that `tools.race.worker` reports."""
        events = list(map(add_texts(decode), result["events"]))
        uses_blocks = any(event["type"] == "blocks" for event in events)
        num_blocks = race.workload.num_blocks if uses_blocks else 0
        return cls(engine, title, result["seconds"], BLOCK_SIZE, num_blocks, race, events)

    @property
    def tokens(self) -> list[list[int]]:
        """The generated token ids of every request."""
        tokens: list[list[int]] = [[] for _ in self.race.workload.prompts]
        for event in self.events:
            if event["type"] == "token":
                tokens[event["request"]] += event["ids"]
        return tokens

    def save(self, directory: Path) -> Path:
        """Write the file, whole or not at all. The same run gives the same bytes."""
        header = {"nanovllm_recording": VERSION, "num_events": len(self.events)}
        header |= {name: getattr(self, name) for name in OWN} | asdict(self.race)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / (self.engine + SUFFIX)
        Recording(self.events, **header).save(path)
        return path

    @classmethod
    def load(cls, path: Path) -> EngineRun:
        """Read a file. Raises ValueError, in one line, if it is missing, damaged or of another version."""
        if not path.is_file():
            raise ValueError(f"{path} does not exist; write it again with make record")
        try:
            recording = Recording.load(path)
        except ValueError as error:
            raise ValueError(f"{error} with make record") from None
        header, events = recording.about, recording.events
        version = header.get("nanovllm_recording")
        if version is None:
            raise ValueError(f"{path} is no recording of the race; write one with make record")
        if version != VERSION:
            reads = f"this code reads format {VERSION}"
            raise ValueError(f"{path} has format {version}, and {reads}; use a matching checkout")
        try:
            check_events(events, header["num_events"])
            race = {f.name: header[f.name] for f in fields(Race)}
            race["workload"] = Workload(**race["workload"])
            return cls(**{name: header[name] for name in OWN}, race=Race(**race), events=events)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged ({error!r}); write it again with make record") from None


OWN = [f.name for f in fields(EngineRun) if f.name not in ("race", "events")]  # what only this engine's header says


def check_events(events: list[Event], num_events: int) -> None:
    if len(events) != num_events:
        raise ValueError(f"{len(events)} events instead of {num_events}")
    for number, event in enumerate(events, start=2):
        if missing := [name for name in DETAILS.get(event["type"], ()) if name not in event]:
            raise ValueError(f"line {number} has no {missing[0]}")


def load_race(directory: Path) -> list[EngineRun]:
    """All runs of a directory, in the order of the ladder.

    Raises ValueError if there are none, or if they do not belong together.
    """
    paths = sorted(directory.glob(f"*{SUFFIX}"), key=lambda path: (path.name.startswith(NANOVLLM), path.name))
    if not paths:
        raise ValueError(f"{directory} holds no recording; make one with make record")
    runs = [EngineRun.load(path) for path in paths]
    for path, run in zip(paths, runs, strict=True):
        if run.race != runs[0].race:
            raise ValueError(f"{path} is not of the same race as {paths[0].name}; record them together")
    return runs
