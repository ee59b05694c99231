"""Write the page "be the scheduler", one HTML file that needs no network: `make scheduler`, and `make docs`, `slides`.

The page holds the sources that it runs, unchanged, and Pyodide to run them. It also holds a recorded run of each scene:
to have something to show at once, and to show that Python in the browser decides as it does here. Where Pyodide cannot
be fetched, the recorded runs are all there is, and the page says so.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tomllib
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

from tools import ROOT
from tools.pages import filled, packed
from tools.scheduler_page.fleet import CARD, MODEL, FleetSetup, play_fleet
from tools.scheduler_page.play import Setup, play
from tools.scheduler_page.pyodide import VERSION, PyodideError, files

HERE = Path(__file__).parent
NAME = "live_scheduler.html"
SOURCES = (
    *("nanovllm/*.py", "nanovllm/engine/*.py", "nanovllm/text/*.py", "nanovllm/trace_view/*.py"),
    "nanovllm/simulate/*.py",
    *(f"nanovllm/models/{name}.py" for name in ("__init__", "checkpoint", "families", "moe_config", "window_config")),
    f"nanovllm/simulate/cards/{CARD}.{MODEL.lower()}.json",
    *("stages/*.py", "stages/stages.toml", "tests/__init__.py", "tests/stages/*.py"),
    *("tools/__init__.py", "tools/exercises/__init__.py", "tools/exercises/exercises.py", "tools/scheduler_page/*.py"),
)


def scenes() -> list[dict[str, Any]]:
    """The scenes, each with what the engine does in it."""
    found = tomllib.loads(read("scenes.toml"))["scene"]
    return [scene | {"run": play(Setup.parse(scene))} for scene in found]


@cache
def fleets() -> list[dict[str, Any]]:
    """The scenes of the second floor, each with what becomes of its requests."""
    found = tomllib.loads(read("fleets.toml"))["scene"]
    return [scene | {"run": play_fleet(FleetSetup.parse(scene))} for scene in found]


def sources() -> bytes:
    """A zip file of the sources. Equal sources give equal bytes."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
            packed.writestr(zipfile.ZipInfo(path.relative_to(ROOT).as_posix()), path.read_bytes())
    return written.getvalue()


def page(runtime: dict[str, bytes]) -> str:
    """The page. runtime: Pyodide's files; without any the page has the recorded runs only."""
    assets = runtime | {"sources.zip": sources()} if runtime else {}
    return filled(
        HERE / "page.html",
        css=HERE / "page.css",
        script=read("fleet.js") + read("page.js"),
        worker=HERE / "worker.js",
        version=VERSION,
        scenes=script_json(scenes()),
        fleets=script_json(fleets()),
        assets=json.dumps({name: packed(content) for name, content in assets.items()}),
    )


def script_json(value: Any) -> str:
    """As it may stand in a script element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def write(directory: Path) -> Path:
    """Write the page into `directory`, with live Python if Pyodide is there or can be fetched. Returns its path."""
    try:
        runtime = files()
    except PyodideError as error:
        print(f"{NAME} shows recorded runs only: {error}", file=sys.stderr)
        runtime = {}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / NAME
    path.write_text(page(runtime), encoding="utf-8")
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.scheduler_page.build", description="Write the page.")
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="directory to write to (default: build)")
    path = write(parser.parse_args(arguments).out)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
