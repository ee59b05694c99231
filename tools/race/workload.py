"""What a race is: its requests, the memory for them, its engines, and a file of how each of them ran. No torch.

The files are gzipped recordings (`nanovllm/trace_view/recording.py`), so `nanovllm trace view` can show them too. The
first line says more: on which machine, of which code, on which workload. Times count from the start of the race, and a
`token` event carries the text that it adds, so that nothing but these files is needed to show the race.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lib.workloads import BLOCK_SIZE, Request, Scenario
from nanovllm.trace_view.engine_state import Event
from nanovllm.trace_view.recording import Recording, add_texts
from stages.manifest import load_stages
from tools import ROOT
from training.grammar import generate_story, opening

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EMBEDDED_MODEL = ROOT / "assets" / "story_model"
MAX_NUM_SEQS = 16
LONG_EVERY, LONG = 5, 6  # every fifth answer is six times as long: what a static batch waits for
LONGEST_AT_ONCE = 3  # the KV memory, in requests of the longest kind
DEMO_KV_SLOTS = 512  # little, so that blocks run out and the stages have to cope
NANOVLLM = "nanovllm"
VERSION = 1  # of the files
SUFFIX = ".jsonl.gz"
DETAILS = {"scheduled": ("tokens", "cached"), "token": ("ids", "text"), "blocks": ("taken", "shared", "freed")}
# How the paragraphs of many stories begin. Each makes one story go on in a way of its own, without any dice.
BEGINNINGS = (
    "A gust of wind", "At a fork in the road", "The first door", "By and by", "In the night", "A grey fog",
    "When the tables stood ready,", "The moon rose,", "On the first of October", "Round the bend", "A cheeky magpie",
    "The path grew slippery,", "A stranger", "Night fell,", "One windy day", "All at once",
)  # fmt: skip
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Workload:
    """Requests as token ids, each with the most tokens that it gets, and the limits that every engine keeps to.

    kv_slots: KV memory in tokens. max_num_seqs: how many sequences may share a step.
    """

    seed: int
    prompts: list[list[int]]
    max_tokens: list[int]
    kv_slots: int
    max_num_seqs: int = MAX_NUM_SEQS

    @property
    def num_tokens(self) -> int:
        """Tokens that are generated in all: exactly that many, since an end of text does not count."""
        return sum(self.max_tokens)

    @property
    def scenario(self) -> Scenario:
        requests = [Request(*request) for request in zip(self.prompts, self.max_tokens, strict=True)]
        return Scenario("race", [requests], self.kv_slots, self.max_num_seqs)


def race_workload(encode: Encode, num_requests: int, tokens: int, seed: int) -> Workload:
    """The requests of the race: two in three continue a half-told story in ways of their own; the others open one.

    tokens: how many the longest of the short answers has; the long answers have six times as many.
    Raises ValueError for a number below 1.
    """
    for name, value in (("requests", num_requests), ("tokens", tokens)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    max_tokens: list[int] = []
    half_told = ""
    num_continued = 0
    for i in range(num_requests):
        if i % 3 == 2:
            text = story_opening(rng)
        else:
            way = num_continued % len(BEGINNINGS)
            if way == 0:
                half_told = half_a_story(rng)
            text = f"{half_told}\n\n{BEGINNINGS[way]}"
            num_continued += 1
        prompts.append(encode(text))
        max_tokens.append(LONG * tokens if i % LONG_EVERY == 1 else rng.randint((tokens + 1) // 2, tokens))
    longest = max(len(prompt) + n for prompt, n in zip(prompts, max_tokens, strict=True))
    blocks_of_longest = -(-longest // BLOCK_SIZE)
    return Workload(seed, prompts, max_tokens, LONGEST_AT_ONCE * blocks_of_longest * BLOCK_SIZE)


def demo_workload(encode: Encode, lengths: tuple[int, ...]) -> Workload:
    """The demos' requests, of which every third opens a story; the others continue the same half-told one."""
    half_told = encode(half_a_story(random.Random(13)))
    prompts = [encode(story_opening(random.Random(100 + i))) if i % 3 == 2 else half_told for i in range(len(lengths))]
    return Workload(13, prompts, list(lengths), DEMO_KV_SLOTS)


def story_opening(rng: random.Random) -> str:
    """The first paragraph of a story that the model has not seen."""
    return opening(rng).text + "\n\n"


def half_a_story(rng: random.Random) -> str:
    """The first sentences of a story that the model has not seen: some hundred tokens."""
    text = generate_story(rng, held_out=True).text[:600]
    return text[: text.rfind(".") + 1]


def engine_titles() -> dict[str, str]:
    """All engines that can take part, in the order of the ladder: "stage_4" -> "4 Prefix caching"."""
    titles = {f"stage_{stage.number}": f"{stage.number} {stage.title}" for stage in load_stages()}
    return titles | {NANOVLLM: NANOVLLM}


def choose_engines(names: list[str] | None, on_gpu: bool) -> list[str]:
    """Who takes part, in the order of the ladder, from names as typed: "4", "stage_4", "nanovllm".

    None: all but stage 7, which needs several GPUs, and without a GPU stage 6. Raises ValueError for an unknown one.
    """
    known = list(engine_titles())
    if names is None:
        return [name for name in known if name != "stage_7" and (on_gpu or name != "stage_6")]
    chosen = {f"stage_{name}" if name.isdigit() else name for name in names}
    if unknown := sorted(chosen - set(known)):
        raise ValueError(f"--stages: there is no {unknown[0]}; there are {', '.join(known)}")
    return [name for name in known if name in chosen]


def load_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory. Ends the program, in one line, where there is none."""
    from tokenizers import Tokenizer

    file = model / "tokenizer.json"
    if not file.is_file():
        sys.exit(f"--model {model}: there is no tokenizer.json in it, so it is no checkpoint that can tell a story")
    return Tokenizer.from_file(str(file))


def describe_model(model: Path, device: str, ranks: int = 1) -> str:
    """The size of a model and where it runs, in half a line."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    where = "on one CPU thread, float32" if device == "cpu" else f"on {device}"
    if ranks > 1:  # each has a thread, or a GPU
        where = f"on {ranks} ranks, each {where}" if device == "cpu" else f"{where} with {ranks} ranks"
    return f"{config['model_type']}, {config['num_hidden_layers']} layers of {config['hidden_size']}, {where}"


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
        return str(self.machine["processor" if self.machine["device"] == "cpu" else "device"])

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
        num_blocks = race.workload.scenario.num_blocks if uses_blocks else 0
        return cls(engine, title, result["seconds"], BLOCK_SIZE, num_blocks, race, events)

    @property
    def tokens(self) -> list[list[int]]:
        """The generated token ids of every request."""
        return tokens_of(self.events, len(self.race.workload.prompts))

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
        """Read a file. Raises ValueError, in one line, if it is damaged or of another version."""
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
            if len(events) != header["num_events"]:
                raise ValueError(f"{len(events)} events instead of {header['num_events']}")
            for number, event in enumerate(events, start=2):
                if missing := [name for name in DETAILS.get(event["type"], ()) if name not in event]:
                    raise ValueError(f"line {number} has no {missing[0]}")
            race = {f.name: header[f.name] for f in fields(Race)}
            race["workload"] = Workload(**race["workload"])
            return cls(**{name: header[name] for name in OWN}, race=Race(**race), events=events)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged ({error!r}); write it again with make record") from None


OWN = [f.name for f in fields(EngineRun) if f.name not in ("race", "events")]  # what only this engine's header says


def tokens_of(events: Sequence[Event], num_requests: int) -> list[list[int]]:
    """The generated token ids of every request."""
    tokens: list[list[int]] = [[] for _ in range(num_requests)]
    for event in events:
        if event["type"] == "token":
            tokens[event["request"]] += event["ids"]
    return tokens


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
