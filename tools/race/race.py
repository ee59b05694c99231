"""The stages and the engine on one workload, side by side: `make race`.

    python -m tools.race.race [--stages 1 4 5 nanovllm] [--device cuda] [--requests 24] [--tokens 10] [--seed 0]
    [--model DIRECTORY_OR_SHAPE] [--together] [--record [--out DIRECTORY]]

Each engine has a process of its own. They all get ready together and then run one at a time, because two engines on
two cores slow each other down. Beside the engine that runs, the picture shows how far the earlier ones were after the
same time.
`--together` starts them all at once. `--record` (`make record`) also writes a file for every engine with its tokens,
its events and their times, which `make replay` shows on any machine. `--model` takes any checkpoint with a tokenizer,
or a shape of benchmarks/shapes, which then tells the embedded model's stories (see `tools/race/shape.py`). Without
these two options this process imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tools import ROOT, until_ctrl_c
from tools.race.views import Lane, Moment, draw_lanes, result_table
from tools.race.workload import (
    EMBEDDED_MODEL,
    EngineRun,
    Race,
    Workload,
    choose_engines,
    describe_model,
    engine_titles,
    load_tokenizer,
    race_workload,
)

if TYPE_CHECKING:
    from benchmarks.lib.process import ClockName

BUILD = ROOT / "build" / "recordings"
SPAWN = multiprocessing.get_context("spawn")
# One thread: as fast as two on a model this small, and it disturbs nobody
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
SIZES = {"cpu": (24, 10), "cuda": (60, 16)}  # requests, tokens: half a minute for the slowest
FRAME = 0.1  # seconds between two pictures
HOLD = 1.0  # seconds for which the end of a heat stays on the screen
ALONE = "One at a time. A ghost ran before, and is where it was after the same time."
TOGETHER = "All at once on {cores} cores: each slows the others down. For times, one at a time."


def work(channel: Connection, job: dict[str, Any]) -> None:
    """The main function of an engine's process. Nothing that libraries print there is shown."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os.environ |= ENVIRONMENT
    try:
        from tqdm import tqdm

        from tools.race.worker import run

        tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a process that is killed leaves behind
        channel.send({"result": run(job, channel.send, channel.recv)})
    except Exception as error:
        channel.send({"failed": f"{type(error).__name__}: {error}".splitlines()[-1]})


class Racer:
    """The process of one engine. What the process reports goes into the engine's lane."""

    def __init__(self, lane: Lane, job: dict[str, Any]) -> None:
        self.lane = lane
        self.ready = False
        self.result: dict[str, Any] | None = None
        self.channel, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=work, args=(theirs, job))
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process inherits this: only `stop` ends it
        self.process.start()
        signal.signal(signal.SIGINT, handler)
        theirs.close()

    def go(self) -> None:
        self.lane.mark = "live"
        with contextlib.suppress(BrokenPipeError):  # the process has failed, and `listen` raises the error
            self.channel.send("go")

    def listen(self, seconds: float) -> None:
        """Take in what is reported within so many seconds. Raises RuntimeError if the engine failed."""
        end = time.monotonic() + seconds
        while self.result is None and self.channel.poll(max(0.0, end - time.monotonic())):
            try:
                message = self.channel.recv()
            except (EOFError, ConnectionResetError):
                message = {"failed": "without a word"}
            if "at" in message:
                self.lane.moments.append(Moment(*message["at"]))
            elif "ready" in message:
                self.ready = True
            elif "failed" in message:
                raise RuntimeError(f"{self.lane.title} failed: {message['failed']}")
            else:
                self.result = message["result"]

    def finish(self) -> str:
        """Complete the lane with the result. Returns a line that says how fast the engine was."""
        assert self.result is not None
        seconds, tokens = self.result["seconds"], self.lane.num_tokens
        self.lane.finish(self.result["events"], seconds)
        return f"{self.lane.title}: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s"

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.channel.close()


class Display:
    """The moving picture; without a terminal, a line whenever there is something new to say."""

    def __init__(self, console: Console, lanes: list[Lane], heading: Text) -> None:
        self.console, self.lanes, self.heading = console, lanes, heading
        self.said = ""
        self.live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        if self.console.is_terminal:
            with Live(console=self.console, auto_refresh=False) as self.live:
                yield
        else:
            self.console.print(self.heading)
            yield

    def draw(self, t: float, footer: str) -> None:
        if self.live is not None:
            lanes = draw_lanes(self.lanes, t, self.console.width)
            self.live.update(Group(self.heading, "", lanes, Text(footer, "dim")), refresh=True)
        elif footer != self.said:
            self.console.print(Text(footer))
        self.said = footer


def get_ready(racers: list[Racer], display: Display) -> None:
    while waiting := [racer for racer in racers if not racer.ready]:
        count = "" if display.live is None else f" {len(racers) - len(waiting)} of {len(racers)} are there."
        display.draw(0.0, f"Each loads and warms up, until all are at the start.{count}")
        for racer in waiting:
            racer.listen(FRAME / len(waiting))


def run_heat(racers: list[Racer], display: Display, footer: str) -> None:
    """Start these racers together and draw them until the last one has its last token."""
    start = time.perf_counter()
    for racer in racers:
        racer.go()
    running = list(racers)
    while running:
        display.draw(time.perf_counter() - start, footer)
        for racer in list(running):
            racer.listen(FRAME / len(running))
            if racer.result is None:
                continue
            running.remove(racer)
            racer.stop()  # a process takes seconds to end by itself, and would take them from who runs next
            said = racer.finish()
            if not running or display.live is None:
                display.draw(racer.lane.seconds or 0.0, said)
    if display.live is not None:
        time.sleep(HOLD)
    for racer in racers:
        racer.lane.mark = "ghost"


def race(options: argparse.Namespace, console: Console, clock: ClockName = "wall") -> tuple[Workload, dict[str, Any]]:
    """Hold the race, measure by `clock`, and print the table. Returns the results of `tools.race.worker` by engine.

    Raises ValueError for a wrong option, and RuntimeError if an engine fails.
    """
    on_gpu = options.device != "cpu"
    names = choose_engines(options.stages, on_gpu)
    tokenizer = load_tokenizer(options.model)
    num_requests, tokens = SIZES["cuda" if on_gpu else "cpu"]
    workload = race_workload(
        lambda text: tokenizer.encode(text).ids,
        num_requests if options.requests is None else options.requests,
        tokens if options.tokens is None else options.tokens,
        options.seed,
    )
    lanes = [Lane(name, engine_titles()[name], workload.num_tokens, len(workload.prompts)) for name in names]
    job = {"model": str(options.model.resolve()), "device": options.device, "clock": clock}
    job["workload"] = asdict(workload)
    rule = TOGETHER.format(cores=os.cpu_count()) if options.together else ALONE
    heading = Text.assemble(
        (f"{len(workload.prompts)} requests, {workload.num_tokens} tokens to generate\n", "bold"),
        (f"{describe_model(options.model, options.device)}; seed {options.seed}\n{rule}", "dim"),
    )
    display = Display(console, lanes, heading)
    racers: list[Racer] = []
    try:
        with display.shown():
            racers += [Racer(lane, job | {"engine": lane.engine}) for lane in lanes]
            get_ready(racers, display)
            if options.together:
                run_heat(racers, display, f"All {len(racers)} are running.")
            else:
                for i, racer in enumerate(racers, start=1):
                    run_heat([racer], display, f"Heat {i} of {len(racers)}: {racer.lane.title} is running.")
    finally:
        for racer in racers:
            racer.stop()
    how = "all at once, in each other's way" if options.together else "one at a time"
    console.print(result_table(lanes, f"\nThe result: {how}, KV memory for {workload.kv_slots} tokens"))
    return workload, {racer.lane.engine: racer.result for racer in racers}


def clock_for(options: argparse.Namespace) -> ClockName:
    """Which clock to measure by for a recording.

    CPU time where one thread computes, since a busy machine hardly changes it; else the clock on the wall.
    """
    from benchmarks.lib.process import choose_clock

    several_processes = options.together or "stage_7" in choose_engines(options.stages, options.device != "cpu")
    return "wall" if several_processes else choose_clock(options.device, threads=1)


def find_model(model: Path) -> Path:
    """The directory of a checkpoint, as it was given; or the one that is made for a shape, if it names one.

    Raises ValueError if it is the name of neither.
    """
    if model.is_dir() or model.parent != Path():
        return model
    from tools.race.shape import story_checkpoint

    try:
        return story_checkpoint(model.name)
    except ValueError as error:
        raise ValueError(f"--model {model}: there is no such directory, and as a shape: {error}") from None


def save_all(workload: Workload, results: dict[str, Any], options: argparse.Namespace, console: Console) -> None:
    """Write one file per engine."""
    from benchmarks.lib.harness import card_slug, commit
    from tools.race.shape import recorded_name

    machine = next(iter(results.values()))["machine"]
    held = Race(
        made=datetime.date.today().isoformat(),
        machine=machine,
        commit=commit("stages", "nanovllm"),
        model=recorded_name(options.model.resolve()),
        together=options.together,
        workload=workload,
    )
    directory = options.out or BUILD / ("cpu" if machine["device"] == "cpu" else card_slug(machine["device"]))
    decode, total = load_tokenizer(options.model).decode, 0
    for engine, result in results.items():
        run = EngineRun.from_result(engine, engine_titles()[engine], result, held, decode)
        total += run.save(directory).stat().st_size
    console.print(f"{len(results)} recordings of {total / 1000:.0f} kB in all, in {directory}", soft_wrap=True)
    console.print(f'To see them: make replay ARGS="--recording {directory}"', soft_wrap=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", nargs="+", metavar="N", help='who takes part: "1", ..., "7", "nanovllm"')
    parser.add_argument(
        "--model", type=Path, default=EMBEDDED_MODEL, help="checkpoint directory, or a shape: Qwen3-0.6B"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--requests", type=int, help="how many requests (default: 24, on a GPU 60)")
    parser.add_argument("--tokens", type=int, help="length of a short answer (default: 10, on a GPU 16)")
    parser.add_argument("--seed", type=int, default=0, help="which stories (default 0)")
    parser.add_argument("--together", action="store_true", help="all at once, in each other's way")
    parser.add_argument("--record", action="store_true", help="keep the race in files")
    parser.add_argument("--out", type=Path, help="directory of the files (default: build/recordings/cpu, or the card)")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The stages and the engine side by side on one workload.")
    add_options(parser)
    options, console = parser.parse_args(arguments), Console(highlight=False)
    try:
        options.model = find_model(options.model)
        if options.record:
            return save_all(*race(options, console, clock_for(options)), options, console)
        race(options, console)
    except (ValueError, RuntimeError) as error:
        sys.exit(str(error))
    print("One run, unrepeated: differences below a fifth are noise.\nMeasured with care: make ladder.")


if __name__ == "__main__":
    sys.exit(until_ctrl_c(main))
