"""Pages made from recordings: the race as a film, a decode step slowed down, and a step of stage 5 in all its parts.

    python -m tools.race.film [--recording DIRECTORY] [--out FILE]

The page needs no network and no server. Space plays and stops, the arrows go a step of the engine below, + and - change
the speed, a digit chooses the engine whose inside is shown.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.trace_view.recording import PARTS, Recording, page_data
from tools import ROOT
from tools.pages import filled, packed
from tools.race.replay import CLOCKS, DEFAULT, describe
from tools.race.views import COLOURS, LETTERS
from tools.race.workload import EngineRun, engine_titles, load_race

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "race.html"
EXPERIMENTS = ROOT / "lectures" / "experiments"
RECORDED_STEPS = ROOT / "notebooks" / "recordings"


def film(runs: Sequence[EngineRun], shown: str = "stage_5") -> str:
    """The page, as HTML. The runs belong to one race; `shown` is the engine whose inside is seen at first.

    Raises ValueError if it did not take part.
    """
    engines = [run.engine for run in runs]
    if shown not in engines:
        raise ValueError(f"{shown} did not take part in the race; there are {', '.join(engines)}")
    race, titles = runs[0].race, list(engine_titles())
    data = {
        "about": f"{describe(race)}. {race.source}; {CLOCKS[race.machine['clock']]}. Striped blocks are shared.",
        "shown": engines.index(shown),
        "max_tokens": race.workload.max_tokens,
        "letters": [LETTERS[i % len(LETTERS)] for i in range(len(race.workload.prompts))],
        "runs": [
            {
                "title": run.title,
                "seconds": run.seconds,
                "uses_blocks": run.num_blocks > 0,
                "colour": COLOURS[titles.index(run.engine) % len(COLOURS)],
                "trace": page_data(Recording(run.events, num_blocks=run.num_blocks), None),
            }
            for run in runs
        ],
    }
    return player("film.html", data)


def launches() -> str:
    """The page on which a recorded decode step of stages 5 and 6 passes a thousand times more slowly."""
    [recording] = RECORDED_STEPS.glob("decode_profile.*.json.gz")
    return player("launches.html", json.loads(gzip.decompress(recording.read_bytes())))


def one_step() -> str:
    """The page that leads through a recorded step of stage 5, and breaks it at a switch."""
    return player("step.html", json.loads((EXPERIMENTS / "stage_5_step.txt").read_text(encoding="utf-8")))


def player(template: str, data: dict[str, Any]) -> str:
    """A page with its data, and with what all of them have in common."""
    content = packed(json.dumps(data, separators=(",", ":")).encode())
    style, script = HERE / "player.css", HERE / "player.js"
    return filled(HERE / template, packed=content, style=style, parts=PARTS, player=script)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a recorded race as one page, to be watched in a browser.")
    parser.add_argument("--recording", type=Path, default=DEFAULT, help="directory (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=BUILD, help="file to write (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        page = film(load_race(options.recording))
    except ValueError as error:
        sys.exit(str(error))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page, encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
