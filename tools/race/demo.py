"""What `make demo` shows: every stage tells a story with the embedded model, then all run the same small race.

    python -m tools.race.demo                   every stage, from the naive one up
    python -m tools.race.demo --stage 5         one stage, live: its blocks, its queues, its texts as they grow

Of large libraries only torch and tokenizers are loaded, so the first text is there within seconds.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stages.manifest import Stage, load_stage, load_stages
from tools.ctrl_c import until_ctrl_c
from tools.race.live import TEMPERATURE, build, generate, show
from tools.race.workload import (
    EMBEDDED_MODEL,
    Workload,
    demo_workload,
    describe_model,
    load_tokenizer,
    story_opening,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from stages.core import SamplingParams

STORY_TOKENS = 100
RACE_LENGTHS = (8, 64, 8, 8, 12, 8, 48, 8, 8, 12, 8, 8)  # two long ones, which a static batch waits for
RANKS = 2  # of stage 7, which starts so many where nobody says how many
NEEDS_A_GPU = (6, 7)  # and tell nothing new about texts: their demos are their benchmarks


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


def story_request(tokenizer: Tokenizer, seed: int, max_tokens: int) -> tuple[list[int], SamplingParams]:
    """One held-out opening as token ids, and how it is to be continued."""
    from stages.core import SamplingParams

    prompt = tokenizer.encode(story_opening(random.Random(seed))).ids
    return prompt, SamplingParams(TEMPERATURE, max_tokens, seed=seed)


def tell_stories(
    console: Console, stages: list[Stage], tokenizer: Tokenizer, model: Path, device: str, tokens: int
) -> None:
    """Each stage in turn: what is new about it, a story, how fast it was, and what it still costs."""
    for stage in stages:
        console.print(Text(f"Stage {stage.number}: {stage.title}", "bold"))
        news = [stage.idea] if stage.number == 1 else [stage.idea, f"New: no more {stage.removes}."]
        console.print(Padding("\n".join([*news, ""]), (0, 0, 0, 2)))
        prompt, params = story_request(tokenizer, stage.number, tokens)
        teller = StoryTeller(console, tokenizer.decode)
        engine = build(stage, model, device, teller.on_event, {})
        teller.prompt(tokenizer.decode(prompt))
        start = time.perf_counter()
        [output] = engine.generate([prompt], params)
        seconds = time.perf_counter() - start
        teller.end(cut_off=len(output) == tokens)
        speed = Text(f"{len(output)} tokens, {len(output) / seconds:.0f} tokens/s", "bold green")
        console.print(Padding(Group(speed, f"What still hurts: {stage.costs}.\n"), (0, 0, 0, 2)))


def compare(console: Console, stages: list[Stage], workload: Workload, model: Path, device: str) -> None:
    """All requests at once through each stage, on the same KV memory; the texts must not change, only the time."""
    console.print(Text(f"{len(workload.prompts)} requests at once", "bold"))
    rules = (
        "Two in three go on with the same half-told story. "
        f"Every stage has KV memory for {workload.kv_slots} tokens, but the first, which keeps nothing.\n"
    )
    console.print(Padding(rules, (0, 0, 0, 2)))
    table = Table()
    for heading in ("stage", "seconds", "tokens/s", "against stage 1", "same texts"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    first: tuple[float, list[list[int]]] | None = None
    for stage in stages:
        engine = build(stage, model, device, lambda _: None, workload.stage_options(stage))
        with console.status(f"stage {stage.number}"):
            start = time.perf_counter()
            outputs = generate(engine, workload)
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
    console.print(f"[bold]nanovllm[/bold], {describe_model(options.model, options.device, ranks)}\n")

    import torch  # takes seconds, so there is something to read before

    if options.device == "cpu":
        torch.set_num_threads(1)  # as fast as two on a model this small, and it disturbs nobody
    if stage:
        show(console, stage, tokenizer, options.model, options.device)
        return
    stages = [stage for stage in load_stages() if stage.number not in NEEDS_A_GPU]
    tell_stories(console, stages, tokenizer, options.model, options.device, STORY_TOKENS)
    workload = demo_workload(lambda text: tokenizer.encode(text).ids, RACE_LENGTHS)
    compare(console, stages, workload, options.model, options.device)
    console.print("\nOne run, unrepeated: differences below a fifth are noise.")
    console.print("One stage live: make stage-5-demo. Measured with care: make stage-5-bench and make ladder.")


if __name__ == "__main__":
    sys.exit(until_ctrl_c(main))
