"""Hold the race and keep it in files that `make replay` shows on any machine: `make record`.

    python -m tools.race.record [--out DIRECTORY] [--commit HASH] [the options of tools.race.race]

Writes a file for every engine with its tokens, its events and their times (see `tools/race/recording.py`).
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.lib.harness import card_slug, commit, model_name
from benchmarks.lib.recorder import ClockName, choose_clock
from tools.ctrl_c import until_ctrl_c
from tools.race import race
from tools.race.race import Outcome, add_options
from tools.race.recording import EngineRun, Race
from tools.race.workload import ROOT, choose_engines

BUILD = ROOT / "build" / "recordings"


def clock_for(options: argparse.Namespace) -> ClockName:
    """Which clock to measure by.

    CPU time where one thread computes, since a busy machine hardly changes it; else the clock on the wall.
    """
    several_processes = options.together or "stage_7" in choose_engines(options.stages, options.device != "cpu")
    return "wall" if several_processes else choose_clock(options.device, threads=1)


def save_all(outcome: Outcome, options: argparse.Namespace, console: Console) -> Path:
    """Write one file per engine. Returns the directory."""
    machine = next(iter(outcome.results.values()))["machine"]
    held = Race(
        made=datetime.date.today().isoformat(),
        machine=machine,
        # A copy of the working tree has no git to ask, so it can be told
        commit={"hash": options.commit, "modified": False} if options.commit else commit("stages", "nanovllm"),
        model=model_name(options.model.resolve()),
        together=options.together,
        workload=outcome.workload,
    )
    directory = options.out or BUILD / ("cpu" if machine["device"] == "cpu" else card_slug(machine["device"]))
    total = 0
    for engine, result in outcome.results.items():
        run = EngineRun.from_result(engine, outcome.titles[engine], result, held, outcome.tokenizer.decode)
        total += run.save(directory).stat().st_size
    console.print(f"{len(outcome.results)} recordings of {total / 1000:.0f} kB in all, in {directory}")
    console.print(f'To see them: make replay ARGS="--recording {directory}"')
    return directory


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Hold the race and keep it in files.")
    add_options(parser)
    parser.add_argument("--out", type=Path, help="directory of the files (default: build/recordings/cpu, or the card)")
    parser.add_argument("--commit", help="what is recorded, where there is no git to ask")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)
    try:
        save_all(race.race(options, console, clock_for(options)), options, console)
    except (ValueError, RuntimeError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    sys.exit(until_ctrl_c(main))
