"""One engine from inside: who waits and who runs, which block holds what, every text as it grows.

    make stage-5-demo         (python -m tools.race.demo --stage 5)

Everything shown is drawn from the engine's events, which say it all from stage 3 on; the first two stages have no
blocks to show. A demo feeds the picture while a stage runs, and `make replay` feeds it from a file. Without a terminal
a demo prints one picture, a third of the way through. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nanovllm.trace_view.engine_state import EngineState
from nanovllm.trace_view.recording import Event, add_texts
from tools.race.workload import BLOCK_SIZE, Workload, demo_workload

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from stages.manifest import Stage

# Letters tell the sequences apart, colours only help; these hues are distinct with any colour vision (Okabe and Ito)
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999")
LETTERS = ascii_uppercase + ascii_lowercase + digits
LENGTHS = (48, 80, 24, 40, 96, 32, 16, 64)
TEMPERATURE = 0.8
PACE = 0.04  # seconds a step is held, to be followed by eye
BLOCKS_A_ROW = 32
COUNTERS = 52  # columns for the counters
FEW = 16  # so many letters have room between them


@dataclass(eq=False)
class Request:
    """What is known of one request from its events."""

    letter: str
    colour: str
    max_tokens: int
    cached: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    last_change: int = -1  # how many tokens there were in all when its text grew last


class EngineView:
    """The state of an engine, followed by its events alone, and a picture of it.

    `token` events carry their text (see `add_texts`). The requests are those of one `generate` call.
    """

    def __init__(self, workload: Workload, num_blocks: int) -> None:
        self.requests = [
            Request(LETTERS[i % len(LETTERS)], f"bold {COLOURS[i % len(COLOURS)]}", n)
            for i, n in enumerate(workload.max_tokens)
        ]
        self.num_blocks = num_blocks
        self.state = EngineState()
        self.keeps = False  # whether free blocks are found again; known by the first that was
        self.step = self.tokens_in_step = 0
        self.computed = self.generated = self.preemptions = 0
        self.replayed: list[tuple[int, int]] | None = None  # sequences and bucket of each step that was a replay
        self.started = self.now = 0.0

    def on_event(self, event: Event) -> None:
        self.now = event["t"]
        request = self.requests[self.state.hear(event)]
        match event["type"]:
            case "admitted":
                request.cached = event["cached"]
            case "scheduled":
                # Not with other events: with asynchronous scheduling the tokens of a step come when the next one has
                # been planned already
                if event["step"] != self.step:
                    self.step, self.tokens_in_step = event["step"], 0
                self.tokens_in_step += event["tokens"]
                self.computed += event["tokens"]
            case "token":
                request.ids += event["ids"]
                request.text += event["text"]
                self.generated += len(event["ids"])
                request.last_change = self.generated
            case "preempted":
                self.preemptions += 1
            case "blocks":
                self.keeps = self.keeps or bool(event["shared"])

    def block_map(self) -> Text:
        """A letter for each block: its owner, `*` if shared, `·` if free, `°` if it holds its last owner's text."""
        text = Text()
        for block in range(self.num_blocks):
            if block and block % BLOCKS_A_ROW == 0:
                text.append("\n")
            owners = self.state.owners.get(block, [])
            if not owners:
                text.append("° " if self.keeps and block in self.state.writers else "· ", "dim")
            elif len(owners) > 1:
                text.append("* ", "bold reverse")
            else:
                text.append(f"{self.requests[owners[0]].letter} ", self.requests[owners[0]].colour)
        return text

    def legend(self) -> str:
        kept = ", ° free, contents kept" if self.keeps else ""
        return f"blocks: a letter owns it, * shared, · free{kept}" if self.num_blocks else "blocks"

    def letter(self, request: Request) -> str:
        return request.letter + " " * (len(self.requests) <= FEW)

    def queues(self) -> Table:
        table = Table.grid(padding=(0, 1))
        statuses = [*self.state.status, *["waiting"] * len(self.requests)]  # who has not been added yet waits, too
        for queue in ("running", "waiting", "finished"):
            letters = Text(overflow="fold")
            for request, status in zip(self.requests, statuses, strict=False):
                if status == queue:
                    letters.append(self.letter(request), request.colour)
            table.add_row(queue, letters)
        return table

    def counters(self) -> Table:
        seconds = max(self.now - self.started, 1e-9)
        table = Table.grid(padding=(0, 2))
        table.add_row("step", f"{self.step}, {self.tokens_in_step} tokens in it")
        table.add_row("tokens computed", f"{self.computed} for {self.generated} generated")
        table.add_row("tokens/s", f"{self.generated / seconds:.0f}")
        if self.replayed is not None:
            rows, padding = sum(b for _, b in self.replayed), sum(b - n for n, b in self.replayed)
            table.add_row("steps replayed", f"{len(self.replayed)}, {padding} of {rows} rows padding")
        if self.num_blocks:
            in_tables = sum(map(len, self.state.tables.values()))
            table.add_row(
                "blocks in use", f"{len(self.state.owners)} of {self.num_blocks}, {in_tables} in block tables"
            )
            table.add_row("found in cache", f"{sum(request.cached for request in self.requests)} tokens")
            table.add_row("preemptions", str(self.preemptions))
        return table

    def texts(self, width: int, height: int) -> Table:
        """The ends of as many texts as there are lines: of those that grew last, in the order of the requests."""
        newest = sorted(self.requests, key=lambda request: request.last_change, reverse=True)[:height]
        table = Table.grid(padding=(0, 1))
        room = max(20, width - 14)
        for request in self.requests:
            if request in newest:
                shown = " ".join(request.text.split())
                table.add_row(
                    Text(request.letter, request.colour),
                    Text(f"{len(request.ids)}/{request.max_tokens}".rjust(7), "dim"),
                    Text(shown if len(shown) <= room else f"…{shown[1 - room :]}", no_wrap=True, overflow="crop"),
                )
        return table

    def render(self, heading: Text, width: int, height: int) -> RenderableType:
        """The picture in at most `height` lines, if there are some 20."""
        above = Table.grid(expand=True)
        above.add_column(ratio=1)
        above.add_column(width=COUNTERS)
        counters = self.counters()
        columns = max(1, width - COUNTERS - 4 - len("finished "))  # for the letters of a queue
        # Room for the three queues even when the letters of one need more lines
        rows = max(counters.row_count, 3 + (sum(len(self.letter(r)) for r in self.requests) - 1) // columns)
        above.add_row(
            Panel(self.queues(), title="queues", height=rows + 2),
            Panel(counters, title="counters", height=rows + 2),
        )
        blocks = self.block_map() if self.num_blocks else Text("it has no blocks", "dim")
        used = 1 + (heading.cell_len - 1) // width + rows + 2 + len(blocks.plain.splitlines()) + 2 + 2
        return Group(
            heading,
            above,
            Panel(blocks, title=self.legend()),
            Panel(self.texts(width, max(1, height - used)), title="texts"),
        )


def build(stage: Stage, model: Path, device: str, on_event: Callable[[Event], None], options: dict[str, int]) -> Any:
    """The stage's engine, warmed up by two tokens of which `on_event` hears nothing."""
    from stages.core import SamplingParams

    listeners: list[Callable[[Event], None]] = []
    engine = stage.engine_class()(str(model), device=device, on_event=lambda e: [f(e) for f in listeners], **options)
    engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    engine.trace.step = 0
    listeners.append(on_event)
    return engine


def generate(engine: Any, workload: Workload) -> list[list[int]]:
    """Sample the texts of a demo: one seed per request, and exactly as many tokens as wanted."""
    from stages.core import SamplingParams

    params = [SamplingParams(TEMPERATURE, n, ignore_eos=True, seed=i) for i, n in enumerate(workload.max_tokens)]
    outputs: list[list[int]] = engine.generate(workload.prompts, params)
    return outputs


def watch_replays(engine: Any, replayed: list[tuple[int, int]]) -> None:
    """Note the number of sequences and the bucket of each step that stage 6 replays from now on."""
    replay = engine.replay

    def noted(bucket: int, batch: list[Any]) -> list[int]:
        replayed.append((len(batch), bucket))
        tokens: list[int] = replay(bucket, batch)
        return tokens

    engine.replay = noted


def show(console: Console, stage: Stage, tokenizer: Tokenizer, model: Path, device: str) -> None:
    """Run one stage on a handful of requests and draw it while it works."""
    workload = demo_workload(lambda text: tokenizer.encode(text).ids, LENGTHS)
    options = workload.stage_options(stage)
    view = EngineView(workload, options.get("num_blocks", 0))
    heading = Text(f"Stage {stage.number}: {stage.title}. {stage.idea}", "bold")
    with_text = add_texts(tokenizer.decode)
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        step = 0
        pictured = False

        def draw() -> None:
            nonlocal pictured
            if live is not None:
                live.update(view.render(heading, console.width, console.height - 1), refresh=True)
                time.sleep(PACE)
            elif not pictured and view.generated >= workload.num_tokens // 3:
                console.print(view.render(heading, console.width, 100))
                pictured = True

        def on_event(event: Event) -> None:
            nonlocal step
            looked_from = time.perf_counter()
            if event["step"] != step:
                step = event["step"]
                draw()
            view.on_event(with_text(event))
            view.started += time.perf_counter() - looked_from  # looking costs the engine nothing

        engine = build(stage, model, device, on_event, options)
        if hasattr(engine, "replay"):
            view.replayed = []
            watch_replays(engine, view.replayed)
        view.started = time.perf_counter()
        generate(engine, workload)
        if live is not None:
            draw()
    if "num_blocks" in options:
        memory = f"KV memory for {options['num_blocks'] * BLOCK_SIZE} tokens"
    elif "max_num_seqs" in options:
        memory = f"KV memory for {workload.kv_slots} tokens: {options['max_num_seqs']} rows of the longest request"
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
