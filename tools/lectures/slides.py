"""Slides and run sheets of the lectures: `make slides` writes build/slides, which needs no network and no server.

make slides                               every lecture, and an index
make slides ARGS="--stage 4"              one of them
python -m tools.lectures.slides --script 4         the run sheet: when, what to say, what to type, what everybody sees
"""

from __future__ import annotations

import argparse
import html
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tools.lectures.lecture import ROOT, Lecture, lecture_of, lecture_paths, read_lecture
from tools.lectures.lecture_html import Renderer, clock, render

OUT = ROOT / "build" / "slides"
WIDTH = 100


def run_sheet(lecture: Lecture) -> Iterator[str]:
    """The timed script, line by line, for a second screen or for paper."""
    renderer, starts = Renderer(lecture), 0.0
    total = sum(slide.minutes for slide in lecture.slides)
    yield f"Stage {lecture.stage.number}: {lecture.title} ({len(lecture.slides)} slides, {total:g} minutes)"
    for number, slide in enumerate(lecture.slides, start=1):
        kind = "" if slide.kind in ("plain", "title") else f" [{slide.kind}]"
        yield f"\n{clock(starts)}  {number}. {renderer.title(slide)}{kind}, {slide.minutes:g} min"
        starts += slide.minutes
        for piece in slide.script:
            text = renderer.commands(piece) if piece.kind == "type" else renderer.fill(piece)
            for i, line in enumerate(laid_out(text, keep=piece.kind == "type")):
                yield f"       {piece.kind.upper() if i == 0 else '':5} {line}".rstrip()
    yield f"\n{clock(starts)}  The end."


def laid_out(text: str, *, keep: bool) -> Iterator[str]:
    for paragraph in text.splitlines() if keep else text.split("\n\n"):
        yield from [paragraph] if keep else textwrap.wrap(paragraph, WIDTH - 13, break_on_hyphens=False)


def index(lectures: list[Lecture]) -> str:
    items = "".join(
        f'<li><a href="{lecture.path.stem}.html">Stage {lecture.stage.number}: {html.escape(lecture.title)}</a>, '
        f"{lecture.minutes:g} minutes, {len(lecture.slides)} slides</li>"
        for lecture in lectures
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        '<meta name="color-scheme" content="light dark"><title>Lectures</title><link rel="icon" href="data:,">'
        "<style>body{font:18px/1.7 sans-serif;max-width:44em;margin:2em auto;padding:0 1em}</style>"
        f"<h1>Lectures</h1><ul>{items}</ul><p>In a lecture: S opens the speaker view, D switches between day and "
        "night, F fills the screen, Esc shows all slides.</p></html>\n"
    )


def build(lectures: list[Lecture], out: Path) -> list[Path]:
    """Write a file for each lecture, and an index of all there are."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for lecture in lectures:
        written.append(out / f"{lecture.path.stem}.html")
        written[-1].write_text(render(lecture), encoding="utf-8")
    (out / "index.html").write_text(index([read_lecture(path) for path in lecture_paths()]), encoding="utf-8")
    return written


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.lectures.slides", description="Build the slides of the lectures."
    )
    parser.add_argument("--stage", type=int, help="only the lecture on this stage")
    parser.add_argument("--script", type=int, metavar="STAGE", help="print the run sheet of a lecture instead")
    parser.add_argument("--out", type=Path, default=OUT, help="directory to write to (default: build/slides)")
    options = parser.parse_args(arguments)
    try:
        if options.script is not None:
            print("\n".join(run_sheet(lecture_of(options.script))))
            return 0
        one = options.stage is not None
        lectures = [lecture_of(options.stage)] if one else [read_lecture(path) for path in lecture_paths()]
        for path in build(lectures, options.out):
            print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
