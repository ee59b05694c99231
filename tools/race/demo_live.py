"""One stage, live in the terminal: who waits and who runs, which block holds what, every text as it grows.

    make stage-5-demo         (python -m tools.race.demo --stage 5)

Everything shown is drawn from the engine's events, which say it all from stage 3 on; the first two stages have no
blocks to show. Without a terminal, one picture is printed, a third of the way through.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tools.race.demo import BLOCK_SIZE, build, engine_options, race_workload

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from stages.manifest import Stage

# Letters tell the sequences apart, colours only help; these hues are distinct with any colour vision (Okabe and Ito)
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999")
LENGTHS = (48, 80, 24, 40, 96, 32, 16, 64)
KV_SLOTS = 512  # little, so that blocks run out and the stages have to cope
PACE = 0.04  # seconds a step is held, to be followed by eye
BLOCKS_A_ROW = 32


@dataclass
class Request:
    """What is known of one request from its events."""

    letter: str
    max_tokens: int
    status: str = "waiting"
    prompt_tokens: int = 0
    cached: int = 0
    preemptions: int = 0
    ids: list[int] = field(default_factory=list)


class EngineView:
    """The state of an engine, followed by its events alone, and a picture of it."""

    def __init__(self, title: str, max_tokens: list[int], num_blocks: int, decode: Callable[[list[int]], str]) -> None:
        self.title = title
        self.requests = [Request(ascii_uppercase[i % 26], n) for i, n in enumerate(max_tokens)]
        self.num_blocks = num_blocks
        self.decode = decode
        self.tables: dict[int, list[int]] = {}
        self.written: set[int] = set()  # blocks that somebody has owned
        self.keeps = False  # whether free blocks are found again; known by the first that was
        self.step = self.tokens_in_step = 0
        self.computed = self.generated = 0
        self.replayed: list[tuple[int, int]] | None = None  # sequences and bucket of each step that was a replay
        self.started = self.now = time.perf_counter()

    def on_event(self, event: dict[str, Any]) -> None:
        self.now = event["t"]
        if event["step"] != self.step:
            self.step, self.tokens_in_step = event["step"], 0
        request = self.requests[event["request"]]
        match event["type"]:
            case "added":
                request.prompt_tokens = event["prompt_tokens"]
            case "admitted":
                request.status, request.cached = "running", event["cached"]
            case "scheduled":
                self.tokens_in_step += event["tokens"]
                self.computed += event["tokens"]
            case "token":
                request.ids += event["ids"]
                self.generated += len(event["ids"])
            case "preempted":
                request.status = "waiting"
                request.preemptions += 1
            case "finished":
                request.status = "finished"
            case "blocks":
                new = event["shared"] + event["taken"]
                self.written.update(event["taken"])
                self.keeps = self.keeps or bool(event["shared"])
                if new:
                    self.tables.setdefault(event["request"], []).extend(new)
                else:
                    self.tables.pop(event["request"], None)

    def owners(self) -> dict[int, list[int]]:
        """block -> the requests that hold it"""
        owners: dict[int, list[int]] = {}
        for request, table in self.tables.items():
            for block in table:
                owners.setdefault(block, []).append(request)
        return owners

    def block_map(self) -> Text:
        """A letter for each block: its owner, `*` if shared, `·` if free, `°` if it holds its last owner's text."""
        owners = self.owners()
        text = Text()
        for block in range(self.num_blocks):
            if block and block % BLOCKS_A_ROW == 0:
                text.append("\n")
            holders = owners.get(block, [])
            if not holders:
                text.append("° " if self.keeps and block in self.written else "· ", "dim")
            elif len(holders) > 1:
                text.append("* ", "bold reverse")
            else:
                text.append(f"{self.requests[holders[0]].letter} ", f"bold {self.colour(holders[0])}")
        return text

    def legend(self) -> str:
        kept = ", ° free, contents kept" if self.keeps else ""
        return f"blocks: a letter owns it, * shared, · free{kept}" if self.num_blocks else "blocks"

    def colour(self, request: int) -> str:
        return COLOURS[request % len(COLOURS)]

    def queues(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for status in ("running", "waiting", "finished"):
            letters = Text()
            for i, request in enumerate(self.requests):
                if request.status == status:
                    letters.append(f"{request.letter} ", f"bold {self.colour(i)}")
            table.add_row(status, letters)
        return table

    def counters(self) -> Table:
        seconds = max(self.now - self.started, 1e-9)
        held = Counter(block for table in self.tables.values() for block in table)
        table = Table.grid(padding=(0, 2))
        table.add_row("step", f"{self.step}, {self.tokens_in_step} tokens in it")
        table.add_row("tokens computed", f"{self.computed} for {self.generated} generated")
        table.add_row("tokens/s", f"{self.generated / seconds:.0f}")
        if self.replayed is not None:
            rows, padding = sum(b for _, b in self.replayed), sum(b - n for n, b in self.replayed)
            table.add_row("steps replayed", f"{len(self.replayed)}, {padding} of {rows} rows padding")
        if self.num_blocks:
            table.add_row("blocks in use", f"{len(held)} of {self.num_blocks}, {sum(held.values())} in block tables")
            table.add_row("found in cache", f"{sum(request.cached for request in self.requests)} tokens")
            table.add_row("preemptions", str(sum(request.preemptions for request in self.requests)))
        return table

    def texts(self, width: int) -> Table:
        """The end of every text: as much of it as fits on a line."""
        table = Table.grid(padding=(0, 1))
        for i, request in enumerate(self.requests):
            shown = " ".join(self.decode(request.ids).split())
            room = max(20, width - 17)
            table.add_row(
                Text(request.letter, f"bold {self.colour(i)}"),
                Text(f"{len(request.ids)}/{request.max_tokens}", "dim"),
                Text(shown if len(shown) <= room else f"…{shown[1 - room :]}", no_wrap=True),
            )
        return table

    def render(self, width: int) -> RenderableType:
        blocks: RenderableType = self.block_map() if self.num_blocks else Text("this stage has no blocks", "dim")
        return Group(
            Text(self.title, "bold"),
            Columns([Panel(self.queues(), title="queues"), Panel(self.counters(), title="counters")]),
            Panel(blocks, title=self.legend(), expand=False),
            Panel(self.texts(width), title="texts"),
        )


def watch_replays(engine: Any, replayed: list[tuple[int, int]]) -> None:
    """From now on note the sequences and the bucket of each step that stage 6 replays; no event tells of that."""
    replay = engine.replay

    def noted(bucket: int, batch: list[Any]) -> list[int]:
        replayed.append((len(batch), bucket))
        tokens: list[int] = replay(bucket, batch)
        return tokens

    engine.replay = noted


def show(console: Console, stage: Stage, tokenizer: Tokenizer, model: Path, device: str) -> None:
    """Run one stage on a handful of requests and draw it while it works."""
    workload = race_workload(tokenizer, LENGTHS)
    options = engine_options(stage, workload, KV_SLOTS)
    title = f"Stage {stage.number}: {stage.title}. {stage.idea}"
    view = EngineView(title, list(LENGTHS), options.get("num_blocks", 0), tokenizer.decode)
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        pictured = False

        def on_event(event: dict[str, Any]) -> None:
            nonlocal pictured
            if event["step"] != view.step:
                drawn_from = time.perf_counter()
                if live is not None:
                    live.update(view.render(console.width), refresh=True)
                    time.sleep(PACE)
                elif not pictured and view.generated >= sum(LENGTHS) // 3:
                    console.print(view.render(console.width))
                    pictured = True
                view.started += time.perf_counter() - drawn_from  # looking costs the engine nothing
            view.on_event(event)

        engine = build(stage, model, device, on_event, **options)
        if hasattr(engine, "replay"):
            view.replayed = []
            watch_replays(engine, view.replayed)
        view.started = time.perf_counter()
        engine.generate(workload.prompts, workload.params)
        if live is not None:
            live.update(view.render(console.width), refresh=True)
    if "num_blocks" in options:
        memory = f"KV memory for {options['num_blocks'] * BLOCK_SIZE} tokens"
    elif "max_num_seqs" in options:
        memory = f"KV memory for {KV_SLOTS} tokens: {options['max_num_seqs']} rows of the longest request"
    else:
        memory = "no KV memory"
    speed = view.generated / (view.now - view.started)
    console.print(
        f"\n{len(LENGTHS)} requests, {view.generated} tokens in {view.step} steps, {speed:.0f} tokens/s; {memory}."
    )
    if view.replayed is not None:
        steps = f"{len(view.replayed)} of the steps were replays"
        stand_in = " Without a GPU a replay calls the step again, and gains nothing." if device == "cpu" else ""
        console.print(f"{steps}, in recordings for {', '.join(map(str, engine.buckets))} sequences.{stand_in}")
