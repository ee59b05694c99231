"""What `make demo` shows: stages 1 to 5 tell a story with the embedded model, then they run the same small race.

    python -m tools.race.demo                   stages 1 to 5, from the naive one up
    python -m tools.race.demo --stage 5         one stage, live: its blocks, its queues, its texts as they grow
    python -m tools.race.demo --stage 5 --impl exercises        yours, on your own earlier stages if they pass
    python -m tools.race.demo --elective moe    an elective, live, on a model of its kind

A stage live is drawn from its events while it works, in 20 seconds, with the keys of `make replay`; without a terminal
one picture is printed, a third of the way through. Of large libraries only torch and tokenizers are loaded, so the
first text is there within seconds.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nanovllm.trace_view.engine_state import Event
from nanovllm.trace_view.recording import add_texts
from stages.manifest import Chapter, Elective, Stage, load_elective, load_stage, load_stages
from tools import until_ctrl_c
from tools.exercises import mine
from tools.race.replay import LASTS, Inside, Player, keyboard
from tools.race.views import EngineView
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

TEMPERATURE = 0.8
STORY_TOKENS = 100
LIVE_LENGTHS = (48, 80, 24, 40, 96, 32, 16, 64)  # of the answers that one stage gives live
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

    def on_event(self, event: Event) -> None:
        if event["type"] == "token":
            self.ids += event["ids"]
            # The last word may go on with the next token, and so may the last character
            text = self.decode(self.ids)
            self.show(text[: max(text.rfind(" "), text.rfind("\n")) + 1])

    def end(self, *, cut_off: bool) -> None:
        self.show(self.decode(self.ids) + " …" * cut_off)
        self.console.print("\n")

    def show(self, text: str) -> None:
        self.write(text[self.shown :])
        self.shown = max(self.shown, len(text))

    def write(self, text: str, style: str = "default") -> None:
        for word in re.findall(r"\n|[^ \n]+", text):
            if word == "\n" or (self.column and self.column + 1 + cell_len(word) > self.width):
                self.console.print()
                self.column = 0
            if word != "\n":
                word = ("  " if self.column == 0 else " ") + word
                self.console.print(Text(word, style), end="", soft_wrap=True)
                self.column += cell_len(word)


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
        news = f"{stage.idea}\n" if stage.number == 1 else f"{stage.idea}\nNew: no more {stage.removes}.\n"
        console.print(Padding(news, (0, 0, 0, 2)))
        prompt, params = story_request(tokenizer, stage.number, tokens)
        teller = StoryTeller(console, tokenizer.decode)
        engine = build(stage, model, device, teller.on_event, {})
        teller.write(tokenizer.decode(prompt), "dim")
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
    table = Table("stage")
    for heading in ("seconds", "tokens/s", "against stage 1", "same texts"):
        table.add_column(heading, justify="right")
    first: tuple[float, list[list[int]]] | None = None
    for stage in stages:
        engine = build(stage, model, device, lambda _: None, workload.scenario.limits(stage))
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


def build(
    stage: Chapter,
    model: Path,
    device: str,
    on_event: Callable[[Event], None],
    options: dict[str, Any],
    impl: str = "stages",
) -> Any:
    """The stage's engine, or the learner's, warmed up by two tokens of which `on_event` hears nothing."""
    from stages.core import SamplingParams

    engine = mine.engine_class(stage, impl)(str(model), device=device, **options)
    engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    engine.trace.step, engine.trace.on_event = 0, on_event
    return engine


def generate(engine: Any, workload: Workload) -> list[list[int]]:
    """Sample the texts of a demo: one seed per request, and exactly as many tokens as wanted."""
    from stages.core import SamplingParams

    params = [SamplingParams(TEMPERATURE, n, ignore_eos=True, seed=i) for i, n in enumerate(workload.max_tokens)]
    outputs: list[list[int]] = engine.generate(workload.prompts, params)
    return outputs


class LiveShow(Inside):
    """A stage at work, drawn while it works: each of its tokens has an equal share of LASTS seconds.

    `run` lets it work in a thread, and keeps what it tells. A show that is slower than the engine goes on after it.
    """

    over = False

    def __init__(
        self,
        stage: Chapter,
        workload: Workload,
        num_blocks: int,
        with_text: Callable[[Event], Event],
        impl: str = "stages",
    ) -> None:
        self.started, self.generated = 0.0, 0
        kind = f"your {stage.kind}" if impl == "exercises" else stage.kind
        heading = Text(f"{kind.capitalize()} {stage.name}: {stage.title}. {stage.idea}", "bold")
        super().__init__(lambda: EngineView(workload, num_blocks, self.started), heading)
        self.workload, self.with_text = workload, with_text
        self.called_off = False
        self.error: BaseException | None = None

    def on_event(self, event: Event) -> None:
        if self.called_off:
            raise KeyboardInterrupt
        self.add(self.with_text(event), LASTS * self.generated / self.workload.num_tokens)
        if event["type"] == "token":
            self.generated += len(event["ids"])

    def run(self, engine: Any) -> None:
        if hasattr(engine, "replay"):
            tell_replays(engine, self.on_event)
        try:
            generate(engine, self.workload)
        except BaseException as error:
            self.error = error
        self.over = True

    @contextmanager
    def running(self, engine: Any) -> Iterator[threading.Thread]:
        """The engine works within, and is called off at the end if it still does. Raises what it has raised."""
        self.started = time.perf_counter()
        self.reset()
        thread = threading.Thread(target=self.run, args=[engine])
        thread.start()
        try:
            yield thread
        finally:
            self.called_off = True
            thread.join()
        if self.error is not None and not isinstance(self.error, KeyboardInterrupt):
            raise self.error


def tell_replays(engine: Any, on_event: Callable[[Event], None]) -> None:
    """From now on tell of each step that stage 6 replays how many sequences it has, and its bucket."""
    replay = engine.replay

    def noted(bucket: int, batch: list[Any]) -> Any:
        about = {"t": time.perf_counter(), "step": engine.trace.step, "request": batch[0].request}
        on_event(about | {"type": "replayed", "rows": len(batch), "bucket": bucket})
        return replay(bucket, batch)

    engine.replay = noted


def show(
    console: Console, stage: Chapter, tokenizer: Tokenizer, model: Path, device: str, impl: str = "stages"
) -> None:
    """Run one stage on a handful of requests and draw it while it works."""
    workload = demo_workload(lambda text: tokenizer.encode(text).ids, LIVE_LENGTHS)
    options = workload.scenario.limits(stage)
    live = LiveShow(stage, workload, options.get("num_blocks", 0), add_texts(tokenizer.decode), impl)
    demo = stage.demo if isinstance(stage, Elective) else {}
    engine = build(stage, model, device, live.on_event, options | demo, impl)
    with live.running(engine) as thread:
        if console.is_terminal:
            with keyboard() as wait:
                if not Player(live).play(console, wait):
                    return
        else:
            thread.join()
            console.print(live.render(LASTS / 3, console.width, 100))
    live.seek(LASTS)
    view = live.view
    memory = f"KV memory for {workload.kv_slots} tokens" if options else "no KV memory"
    if options and "num_blocks" not in options:
        memory += f": {options['max_num_seqs']} rows of the longest request"
    rate = view.generated / (view.now - view.started)
    console.print(
        f"\n{len(LIVE_LENGTHS)} requests, {view.generated} tokens in {view.step} steps, {rate:.0f} tokens/s; {memory}."
    )
    if view.replayed:
        steps = f"{len(view.replayed)} of the steps were replays"
        stand_in = " Without a GPU a replay calls the step again, and gains nothing." if device == "cpu" else ""
        console.print(f"{steps}, in recordings for {', '.join(map(str, engine.buckets))} sequences.{stand_in}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Text from stages 1 to 5, with its speed.")
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--stage", type=int, metavar="N", help="one stage alone, live")
    alone.add_argument("--elective", metavar="NAME", help="one elective alone, live")
    parser.add_argument("--model", type=Path, help="checkpoint directory (default: the embedded model)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--impl", choices=("stages", "exercises"), default="stages", help="with --stage: ours, or yours in exercises/"
    )
    options = parser.parse_args(arguments)
    if options.impl == "exercises" and options.stage is None:
        parser.error("--impl exercises needs --stage N; an elective is shown as we wrote it")
    console = Console(highlight=False)
    stage: Chapter | None = None
    model: Path = options.model or EMBEDDED_MODEL
    try:
        if options.stage is not None:
            stage = load_stage(options.stage)
            if options.impl == "exercises":
                mine.require_right(stage)
        if options.elective is not None:
            stage = load_elective(options.elective)
            model = options.model or EMBEDDED_MODEL.with_name(stage.model)
    except ValueError as error:
        sys.exit(str(error))
    tokenizer = load_tokenizer(model)
    ranks = RANKS if stage and "tensor_parallel_size" in stage.options else 1
    console.print(f"[bold]nanovllm[/bold], {describe_model(model, options.device, ranks)}\n")

    import torch  # takes seconds, so there is something to read before

    if options.device == "cpu":
        torch.set_num_threads(1)  # as fast as two on a model this small, and it disturbs nobody
    if stage:
        show(console, stage, tokenizer, model, options.device, options.impl)
        return
    stages = [stage for stage in load_stages() if stage.number not in NEEDS_A_GPU]
    tell_stories(console, stages, tokenizer, model, options.device, STORY_TOKENS)
    workload = demo_workload(lambda text: tokenizer.encode(text).ids, RACE_LENGTHS)
    compare(console, stages, workload, model, options.device)
    console.print("\nOne run, unrepeated: differences below a fifth are noise.")
    console.print("One stage live: make stage-5-demo. Measured with care: make stage-5-bench and make ladder.")


if __name__ == "__main__":
    sys.exit(until_ctrl_c(main))
