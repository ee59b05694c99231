"""What `make demo` shows: every stage tells a story with the embedded model, then all run the same small race.

    python -m tools.race.demo                   every stage, from the naive one up
    python -m tools.race.demo --stage 5         one stage, live: its blocks, its queues, its texts as they grow

Nothing but torch, tokenizers and `stages/` is loaded, so the first text is there within seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stages.manifest import Stage, load_stage, load_stages
from tools.ctrl_c import until_ctrl_c
from training.story_grammar import generate_story, opening

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from stages.core import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED_MODEL = ROOT / "assets" / "story_model"
BLOCK_SIZE = 16
TEMPERATURE = 0.8
STORY_TOKENS = 100
RACE_LENGTHS = (8, 64, 8, 8, 12, 8, 48, 8, 8, 12, 8, 8)  # two long ones, which a static batch waits for
RACE_KV_SLOTS = 512
RANKS = 2  # of stage 7, which starts so many where nobody says how many
NEEDS_A_GPU = (6, 7)  # and tell nothing new about texts: their demos are their benchmarks


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, with how each is to be continued; every stage gets the same."""

    prompts: list[list[int]]
    params: list[SamplingParams]


class StoryTeller:
    """Prints a text word by word as its tokens come, breaking lines between words."""

    def __init__(self, console: Console, decode: Callable[[list[int]], str]) -> None:
        self.console = console
        self.decode = decode
        self.width = min(console.width, 100)
        self.ids: list[int] = []
        self.shown = self.column = 0

    def prompt(self, text: str) -> None:
        self.write(text, "dim")

    def on_event(self, event: dict[str, Any]) -> None:
        if event["type"] == "token":
            self.ids += event["ids"]
            # The last word may go on with the next token, and so may the last character
            text = self.decode(self.ids)
            self.show(text[: max(text.rfind(" "), text.rfind("\n")) + 1])

    def end(self, *, cut_off: bool) -> None:
        self.show(self.decode(self.ids))
        if cut_off:
            self.write(" …", "default")
        self.console.print("\n")

    def show(self, text: str) -> None:
        if len(text) > self.shown:
            self.write(text[self.shown :], "default")
            self.shown = len(text)

    def write(self, text: str, style: str) -> None:
        for i, line in enumerate(text.split("\n")):
            if i:
                self.console.print()
                self.column = 0
            for word in line.split(" "):
                self.put(word, style)

    def put(self, word: str, style: str) -> None:
        if not word:
            return
        if self.column and self.column + 1 + cell_len(word) > self.width:
            self.console.print()
            self.column = 0
        text = ("  " if self.column == 0 else " ") + word
        self.console.print(Text(text, style), end="", soft_wrap=True)
        self.column += cell_len(text)


def story_workload(tokenizer: Tokenizer, seed: int, max_tokens: int) -> Workload:
    """One held-out opening, to be continued."""
    from stages.core import SamplingParams

    prompt = tokenizer.encode(opening(random.Random(seed)).text + "\n\n").ids
    return Workload([prompt], [SamplingParams(TEMPERATURE, max_tokens, seed=seed)])


def race_workload(tokenizer: Tokenizer, lengths: tuple[int, ...]) -> Workload:
    """A story that is half told and then goes on in several ways; every third request is another story altogether."""
    from stages.core import SamplingParams

    story = generate_story(random.Random(13), held_out=True).text[:600]
    half_told = tokenizer.encode(story[: story.rfind(".") + 1]).ids
    prompts = []
    for i in range(len(lengths)):
        other = tokenizer.encode(opening(random.Random(100 + i)).text + "\n\n").ids
        prompts.append(other if i % 3 == 2 else half_told)
    return Workload(prompts, [SamplingParams(TEMPERATURE, n, ignore_eos=True, seed=i) for i, n in enumerate(lengths)])


def engine_options(stage: Stage, workload: Workload, kv_slots: int) -> dict[str, int]:
    """The same KV memory for every stage: as blocks, or as rows that could each hold the longest request."""
    longest = max(len(p) + params.max_tokens for p, params in zip(workload.prompts, workload.params, strict=True))
    if "num_blocks" in stage.options:
        return {"num_blocks": kv_slots // BLOCK_SIZE, "block_size": BLOCK_SIZE}
    return {"max_num_seqs": max(1, kv_slots // longest)} if "max_num_seqs" in stage.options else {}


def build(stage: Stage, model: Path, device: str, on_event: Callable[[dict[str, Any]], None], **options: int) -> Any:
    """The stage's engine, warmed up by two tokens that nobody sees."""
    from stages.core import SamplingParams

    listeners: list[Callable[[dict[str, Any]], None]] = []
    engine = stage.engine_class()(str(model), device=device, on_event=lambda e: [f(e) for f in listeners], **options)
    engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    engine.trace.step = 0
    listeners.append(on_event)
    return engine


def tell_stories(
    console: Console, stages: list[Stage], tokenizer: Tokenizer, model: Path, device: str, tokens: int
) -> None:
    """Each stage in turn: what is new about it, a story, how fast it was, and what it still costs."""
    for stage in stages:
        console.print(Text(f"Stage {stage.number}: {stage.title}", "bold"))
        news = [stage.idea] if stage.number == 1 else [stage.idea, f"New: no more {stage.removes}."]
        console.print(Padding("\n".join([*news, ""]), (0, 0, 0, 2)))
        workload = story_workload(tokenizer, stage.number, tokens)
        teller = StoryTeller(console, tokenizer.decode)
        engine = build(stage, model, device, teller.on_event)
        teller.prompt(tokenizer.decode(workload.prompts[0]))
        start = time.perf_counter()
        [output] = engine.generate(workload.prompts, workload.params)
        seconds = time.perf_counter() - start
        teller.end(cut_off=len(output) == tokens)
        speed = Text(f"{len(output)} tokens, {len(output) / seconds:.0f} tokens/s", "bold green")
        console.print(Padding(Group(speed, f"What still hurts: {stage.costs}.\n"), (0, 0, 0, 2)))


def race(console: Console, stages: list[Stage], workload: Workload, model: Path, device: str, kv_slots: int) -> None:
    """All requests at once through each stage, on the same KV memory; the texts must not change, only the time."""
    console.print(Text(f"{len(workload.prompts)} requests at once", "bold"))
    rules = (
        f"Two in three go on with the same half-told story. Every stage has KV memory for {kv_slots} tokens, but the "
        "first, which keeps nothing.\n"
    )
    console.print(Padding(rules, (0, 0, 0, 2)))
    table = Table()
    for heading in ("stage", "seconds", "tokens/s", "against stage 1", "same texts"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    first: tuple[float, list[list[int]]] | None = None
    for stage in stages:
        engine = build(stage, model, device, lambda _: None, **engine_options(stage, workload, kv_slots))
        with console.status(f"stage {stage.number}"):
            start = time.perf_counter()
            outputs = engine.generate(workload.prompts, workload.params)
            seconds = time.perf_counter() - start
        first = first or (seconds, outputs)
        num_tokens = sum(map(len, outputs))
        table.add_row(
            f"{stage.number} {stage.title}",
            f"{seconds:.2f}",
            f"{num_tokens / seconds:.0f}",
            f"{first[0] / seconds:.1f}×",
            "yes" if outputs == first[1] else "NO",
        )
    console.print(table)


def load_tokenizer(model: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = model / "tokenizer.json"
    if not file.is_file():
        sys.exit(f"--model {model}: there is no tokenizer.json in it, so it is no checkpoint that can tell a story")
    return Tokenizer.from_file(str(file))


def describe(model: Path, device: str, ranks: int = 1) -> str:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    where = "on one CPU thread, float32" if device == "cpu" else f"on {device}"
    if ranks > 1:  # each has a thread, or a GPU
        where = f"on {ranks} ranks, each {where}" if device == "cpu" else f"{where} with {ranks} ranks"
    return f"{config['model_type']}, {config['num_hidden_layers']} layers of {config['hidden_size']}, {where}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Text from every stage, with its speed.")
    parser.add_argument("--stage", type=int, metavar="N", help="one stage alone, live")
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL, help="checkpoint directory")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    tokenizer = load_tokenizer(options.model)
    try:
        stage = None if options.stage is None else load_stage(options.stage)
    except ValueError as error:
        sys.exit(str(error))
    ranks = RANKS if stage and "tensor_parallel_size" in stage.options else 1
    console.print(f"[bold]nanovllm[/bold], {describe(options.model, options.device, ranks)}\n")

    import torch  # takes seconds, so there is something to read before

    if options.device == "cpu":
        torch.set_num_threads(1)  # as fast as two on a model this small, and it disturbs nobody
    if stage:
        from tools.race.demo_live import show

        show(console, stage, tokenizer, options.model, options.device)
        return
    stages = [stage for stage in load_stages() if stage.number not in NEEDS_A_GPU]
    tell_stories(console, stages, tokenizer, options.model, options.device, STORY_TOKENS)
    workload = race_workload(tokenizer, RACE_LENGTHS)
    race(console, stages, workload, options.model, options.device, RACE_KV_SLOTS)
    console.print("\nOne run, unrepeated: differences below a fifth are noise.")
    console.print("One stage live: make stage-5-demo. Measured with care: make stage-5-bench and make ladder.")


if __name__ == "__main__":
    sys.exit(until_ctrl_c(main))
