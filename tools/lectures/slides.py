"""Slides and run sheets of the lectures: `make slides` writes build/slides, which needs no network and no server.

    make slides                               every lecture, and an index
    make slides ARGS="--stage 4"              one of them
    make slides ARGS="--script 4"             the run sheet: when, what to say, what to type, what everybody sees
    make slides ARGS=--experiments            run lectures/experiments again, and store what they print

A lecture is one HTML file: reveal.js, the theme, pictures and notes are all in it, and it asks for nothing else. On a
narrow window, and where no script runs, the same file is a page to scroll, with the script under each slide.
"""

from __future__ import annotations

import argparse
import base64
import html
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]

from tools import ROOT, until_ctrl_c
from tools.exercises.exercises import lecture_exercises
from tools.lectures import pulls
from tools.lectures.lecture import (
    LECTURES,
    Lecture,
    LectureError,
    Piece,
    Slide,
    lecture_path,
    lecture_paths,
    read_lecture,
    split_words,
)
from tools.pages import filled
from tools.pictures.colours import at_night
from tools.race.film import film, launches, one_step
from tools.race.replay import DEFAULT
from tools.race.workload import load_race
from tools.scheduler_page import build as scheduler_page

REVEAL = ROOT / "assets" / "vendor" / "reveal"
OUT = ROOT / "build" / "slides"
SHEET = 87  # characters of a line in a run sheet
DAY, NIGHT = "xcode", "monokai"  # styles of Pygments whose colours can be read on our paper
TAGS = {"question": "Guess first", "answer": "Measured", "live": "Live"}
LARGEST, SMALLEST = 23.0, 14.0  # pixels of a letter of code, on a slide of 1280 x 720 pixels
WIDE, NARROW, TALL = 1110, 505, 540  # pixels for code: the width on a whole slide, in one of two columns; the height
COLUMN, FRAME = 580, 76  # pixels of height: of all code below a title; of what is around a piece of code
INLINE = re.compile(r"\{\{(.+?)\}\}")


class Renderer:
    """Turns the slides of one lecture into HTML. Every error names file and line of the lecture's source."""

    def __init__(self, lecture: Lecture) -> None:
        self.lecture = lecture
        self.markdown = MarkdownIt("commonmark", {"html": True, "highlight": coloured}).enable("table")

    def at(self, piece: Piece, make: Callable[[], str]) -> str:
        try:
            return make()
        except ValueError as error:
            raise LectureError(self.lecture.path, piece.line, str(error)) from error

    def title(self, slide: Slide) -> str:
        return self.fill(Piece("text", slide.title, slide.line))

    def fill(self, piece: Piece) -> str:
        """The text of a piece, with the measured figures in the place of {{...}}."""
        return self.at(piece, lambda: INLINE.sub(lambda m: pulls.pull_inline(split_words(m[1])), piece.text))

    def slide(self, slide: Slide, starts: float) -> str:
        columns: list[list[str]] = [[]]
        width = NARROW if any(piece.kind == "|||" for piece in slide.body) else WIDE
        for piece in slide.body:
            if piece.kind == "|||":
                columns.append([])
            else:
                columns[-1].append(self.shown(piece, width))
        bodies = [alike("\n".join(column)) for column in columns]
        body = bodies[0]
        if len(columns) > 1:
            body = '<div class="columns">' + "".join(f"<div>{column}</div>" for column in bodies) + "</div>"
        level = "h1" if slide.kind == "title" else "h2"
        label = TAGS.get(slide.kind) or (f"Stage {self.lecture.stage.number}" if slide.kind == "title" else "")
        tag = f'<p class="tag">{label}</p>' if label else ""
        return (
            f'<section class="{slide.kind}" data-timing="{slide.minutes * 60:g}">{tag}'
            f"<{level}>{self.markdown.renderInline(self.title(slide))}</{level}>\n{body}\n"
            f'<aside class="notes"><p><b>{clock(starts)}</b>, {slide.minutes:g} min</p>\n'
            f"{''.join(self.said(piece) for piece in slide.script)}</aside></section>\n"
        )

    def said(self, piece: Piece) -> str:
        if piece.kind == "type":
            return f'<pre style="white-space: pre-wrap">{lined(self.fill(piece))}</pre>'
        text = self.fill(piece)
        return self.markdown.render(f"*They see:* {text}" if piece.kind == "see" else text)

    def shown(self, piece: Piece, width: int) -> str:
        if piece.kind == "text":
            return self.markdown.render(self.fill(piece))
        return self.at(piece, lambda: self.pulled(piece, width))

    def pulled(self, piece: Piece, width: int) -> str:
        words = list(piece.words)
        match piece.kind, words:
            case (("code" | "hole"), [path, name, *options]):
                return code(pulls.pull_code(path, name, *options, opened=piece.kind == "hole"), width)
            case "picture", [path, *alt] if path.endswith(".svg") and alt:
                label = f'<svg role="img" aria-label="{html.escape(" ".join(alt))}" '
                return f"<figure>{pulls.read(path).replace('<svg ', label, 1)}</figure>"
            case "picture", [path, text, *alt] if alt:
                return picture(pulls.pull_png(path, text), " ".join(alt))
            case "choices", [_, *_]:
                return choices(self.fill(piece).split(" | "))
            case "output", [path, text, *pattern] if len(pattern) < 2:
                return output(pulls.pull_output(path, text, *pattern), width)
            case "printed", [name, *pattern] if len(pattern) < 2:
                return output(pulls.pull_printed(name, *pattern), width)
            case "table", [name, key, *keys]:
                measured = self.markdown.render(pulls.pull_table(name, key, *keys))
                source = html.escape(pulls.pull_source(name))
                return f'<div class="scroll measured">{measured}</div><p class="source">{source}</p>'
            case "film", [name]:
                page = launches() if name == "launches" else race(name)
                return f'<iframe class="film" title="A film: {name}" srcdoc="{html.escape(page)}"></iframe>'
            case "run", [_, *_]:
                command = f"$ {self.fill(piece)}"
                return f'<pre class="terminal" {fitted([command], width)}>{lined(command)}</pre>'
            case "exercises", []:
                mine = [e for e in lecture_exercises().values() if e.stage == self.lecture.stage.number]
                items = (f"<li><b>{e.name}</b> {self.markdown.renderInline(e.title)}</li>" for e in mine)
                return f"<ul>{''.join(items)}</ul>"
        raise ValueError(f"@{piece.kind} does not take {piece.text!r}")


@cache
def race(engine: str) -> str:
    """The film of the recorded race, with the inside of that engine."""
    return film(load_race(DEFAULT), engine)


def picture(day: str, said: str) -> str:
    """A picture of a notebook, in base64, for the day and for the night, and below it what there is to see."""
    said = html.escape(said)
    night = base64.b64encode(at_night(base64.b64decode(day))).decode()
    images = (
        f'<img class="{when}" src="data:image/png;base64,{data}" alt="{said}">'
        for when, data in (("day", day), ("night", night))
    )
    return f"<figure>{''.join(images)}<figcaption>{said}</figcaption></figure>"


def choices(answers: Sequence[str]) -> str:
    """Buttons to answer with; the right one begins with an asterisk. Raises ValueError if there is not one."""
    different = {answer.removeprefix("*") for answer in answers}
    if sum(answer.startswith("*") for answer in answers) != 1 or len(different) < max(2, len(answers)):
        raise ValueError(f"@choices has one right answer (*) among several others, unlike {' | '.join(answers)}")
    buttons = (
        f'<button{" class=right" if answer.startswith("*") else ""} aria-pressed="false" data-key="{key}">'
        f"{html.escape(answer.removeprefix('*'))}</button>"
        for key, answer in enumerate(answers, start=1)
    )
    return f'<div class="choices">{"".join(buttons)}</div>'


def clock(minutes: float) -> str:
    return f"{int(minutes):02d}:{round(60 * (minutes % 1)):02d}"


def fitted(lines: Sequence[str], width: int) -> str:
    """The letter size at which these lines fit, as a style. Raises ValueError if that is too small to read."""
    longest = max(map(len, lines))
    size = min(LARGEST, width / (0.605 * longest), TALL / (1.36 * len(lines)))
    if size < SMALLEST:
        raise ValueError(f"{len(lines)} lines of up to {longest} characters are too much for a slide; show a part")
    return f'style="--size: {size:.1f}px"'


def alike(column: str) -> str:
    """A column in which all pieces of code have one letter size: the smallest that any needs, or that lets all fit."""
    sizes = [float(size) for size in re.findall(r'<pre class="code" style="--size: ([\d.]+)px"', column)]
    if sizes and not re.sub(r'<p class="where">.*?</pre>', "", column, flags=re.DOTALL).strip():
        sizes.append((COLUMN - FRAME * len(sizes)) / (1.36 * column.count('<span class="line')))
    smallest = min(sizes, default=0.0)
    return re.sub(r'(<pre class="code" style="--size: )[\d.]+', rf"\g<1>{smallest:.1f}", column)


def coloured(text: str, language: str, _attributes: str = "") -> str:
    """Source code as coloured HTML lines, without a frame."""
    shown: str = highlight(text, get_lexer_by_name(language or "text"), HtmlFormatter(nowrap=True))
    return shown


def code(pulled: pulls.Code, width: int) -> str:
    size = fitted(pulled.lines, width)
    lines = coloured("\n".join(pulled.lines), "python").rstrip("\n").split("\n")
    text = "".join(
        line(shown, plain, "mark" if i in pulled.marked else "")
        for i, (shown, plain) in enumerate(zip(lines, pulled.lines, strict=True))
    )
    return f'<p class="where">{html.escape(pulled.label)}</p><pre class="code" {size}><code>{text}</code></pre>'


def output(printed: str, width: int) -> str:
    return f'<pre class="output" {fitted(printed.splitlines(), width)}>{lined(printed)}</pre>'


def lined(text: str) -> str:
    """Lines of a <pre>. Options of a command ("--checkpoint") are not broken after their hyphens."""
    whole = r'<span style="white-space: nowrap">\g<0></span>'
    return "".join(line(re.sub(r"--?\w+", whole, html.escape(plain)), plain) for plain in text.splitlines())


def line(shown: str, plain: str, kind: str = "") -> str:
    """A line of a <pre> as an element of its own, so that on a narrow screen the rest of a broken line is indented."""
    margin = len(plain) - len(plain.lstrip())
    return f'<span class="{f"line {kind}".strip()}" style="--margin: {margin}ch">{shown}\n</span>'


def code_colours() -> str:
    """The style sheet for the colours of code, in light and dark mode."""
    day = HtmlFormatter(style=DAY).get_style_defs("pre")
    night = HtmlFormatter(style=NIGHT).get_style_defs('[data-theme="dark"] pre')
    # Only the colours of tokens: the frame is the theme's
    return "\n".join(line for line in f"{day}\n{night}".splitlines() if re.search(r"pre \.\w+ \{", line))


def script(path: Path) -> str:
    """JavaScript that can stand inside a <script> element: nothing in it closes the element."""
    text = re.sub(r"\n//# sourceMappingURL=.*", "", path.read_text(encoding="utf-8"))
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def render(lecture: Lecture) -> str:
    """A lecture as one HTML file. Raises LectureError for a directive that names what is not there."""
    renderer = Renderer(lecture)
    return filled(
        LECTURES / "slides.html",
        title=html.escape(f"Stage {lecture.stage.number}: {lecture.title}"),
        reveal_css=REVEAL / "reveal.css",
        theme=(LECTURES / "slides.css").read_text(encoding="utf-8") + code_colours(),
        page=LECTURES / "page.css",
        speaker=LECTURES / "speaker.css",
        slides="".join(renderer.slide(slide, starts) for slide, starts in lecture.timetable()),
        reveal=script(REVEAL / "reveal.js"),
        notes=script(REVEAL / "notes.js"),
        start=script(LECTURES / "slides.js"),
    )


def run_sheet(lecture: Lecture) -> Iterator[str]:
    """The timed script, line by line, for a second screen or for paper."""
    renderer = Renderer(lecture)
    number, total = len(lecture.slides), sum(slide.minutes for slide in lecture.slides)
    yield f"Stage {lecture.stage.number}: {lecture.title} ({number} slides, {total:g} minutes)"
    for number, (slide, starts) in enumerate(lecture.timetable(), start=1):
        kind = "" if slide.kind in ("plain", "title") else f" [{slide.kind}]"
        yield f"\n{clock(starts)}  {number}. {renderer.title(slide)}{kind}, {slide.minutes:g} min"
        for piece in slide.script:
            if piece.kind == "type":
                lines = renderer.fill(piece).splitlines()
            else:
                paragraphs = renderer.fill(piece).split("\n\n")
                lines = [line for p in paragraphs for line in textwrap.wrap(p, SHEET, break_on_hyphens=False)]
            for i, line in enumerate(lines):
                yield f"       {piece.kind.upper() if i == 0 else '':5} {line}".rstrip()
    yield f"\n{clock(total)}  The end."


def card(lecture: Lecture) -> str:
    """A lecture in the index."""
    stage, questions = lecture.stage, sum(slide.kind == "question" for slide in lecture.slides)
    counts = f"{lecture.minutes:g} minutes, {len(lecture.slides)} slides, {questions} questions to guess"
    return (
        f'<a href="{lecture.path.stem}.html"><b>Stage {stage.number}</b><h2>{html.escape(lecture.title)}</h2>'
        f"<p>{html.escape(stage.idea)}</p><small>{counts}</small></a>"
    )


def build(lectures: Iterable[Lecture], out: Path) -> list[Path]:
    """Write one file per lecture, an index, and the pages of recordings. Returns the paths of the lectures."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for lecture in lectures:
        written.append(out / f"{lecture.path.stem}.html")
        written[-1].write_text(render(lecture), encoding="utf-8")
    cards = "".join(map(card, map(read_lecture, lecture_paths())))
    index = filled(LECTURES / "index.html", lectures=cards, theme=LECTURES / "slides.css")
    (out / "index.html").write_text(index, encoding="utf-8")
    (out / "race.html").write_text(race("stage_5"), encoding="utf-8")
    (out / "launches.html").write_text(launches(), encoding="utf-8")
    (out / "step.html").write_text(one_step(), encoding="utf-8")
    return written


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.lectures.slides", description="Build the slides of the lectures."
    )
    parser.add_argument("--stage", type=int, help="only the lecture on this stage")
    parser.add_argument("--script", type=int, metavar="STAGE", help="print the run sheet of a lecture instead")
    parser.add_argument("--experiments", action="store_true", help="run lectures/experiments again instead")
    parser.add_argument("--out", type=Path, default=OUT, help="directory to write to (default: build/slides)")
    options = parser.parse_args(arguments)
    try:
        if options.experiments:
            for path in pulls.experiments():
                path.with_suffix(".txt").write_text(pulls.printed_by(path), encoding="utf-8")
        elif options.script is not None:
            print("\n".join(run_sheet(read_lecture(lecture_path(options.script)))), flush=True)
        else:
            paths = lecture_paths() if options.stage is None else [lecture_path(options.stage)]
            for path in build(map(read_lecture, paths), options.out):
                print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")
            if options.stage is None:
                print(scheduler_page.write(options.out))
                print(f"{options.out / 'index.html'} leads to all of them")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(until_ctrl_c(main))
