"""Read a lecture: lectures/stage_N.md becomes slides, each with its minutes, what it shows and what to say.

    # Prefix caching {1 min}                        the first slide; `@minutes 45` under it says how long the lecture is
    ## What does the second one cost? {2 min, question}
    Markdown, and directives that show what stands elsewhere:
    @code stages/stage_4_prefix_caching.py chained_digest
    @picture notebooks/4_prefix_caching.ipynb "ref_counts(run.events" The counts of every block, step by step
    |||                                             the rest of the slide is a second column
    @say                                            from here on the script: what to say in one's own words,
    @type                                           what to type,
    @see                                            and what everybody should then see

`tools/lectures/pulls.py` fetches what a directive names. This module knows only the form of a directive.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stages.manifest import Stage, load_stage
from tools import ROOT

LECTURES = ROOT / "lectures"
SHOWN = ("code", "hole", "picture", "output", "printed", "table", "run", "exercises", "choices", "film")
SCRIPT = ("say", "type", "see")
KINDS = ("title", "plain", "question", "answer", "live")

HEADING = re.compile(r"(##?) (?P<title>.+?) \{(?P<minutes>\d+(?:\.5)?) min(?:, (?P<kind>\w+))?\}")
MARK = re.compile(r"@(?P<name>[a-z]+)(?: (?P<rest>.*))?|\|\|\||##? .*")  # what no text goes on through
FENCE = re.compile(r" *(`{3,}|~{3,})")


class LectureError(ValueError):
    """A mistake in a lecture's source. The message begins with file and line."""

    def __init__(self, path: Path, line: int, complaint: str) -> None:
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        super().__init__(f"{name}:{line}: {complaint}")


@dataclass(frozen=True)
class Piece:
    """Lines of Markdown ("text"), a column break ("|||"), a directive with its words, or a part of the script."""

    kind: str
    text: str
    line: int
    words: tuple[str, ...] = ()


@dataclass
class Slide:
    title: str
    minutes: float
    kind: str  # one of KINDS; "live" is live coding
    line: int
    body: list[Piece] = field(default_factory=list)
    script: list[Piece] = field(default_factory=list)


@dataclass
class Lecture:
    path: Path
    stage: Stage
    minutes: float  # as `@minutes` promises
    slides: list[Slide]

    @property
    def title(self) -> str:
        return self.slides[0].title

    def timetable(self) -> Iterator[tuple[Slide, float]]:
        """Every slide with the minute at which it starts."""
        starts = 0.0
        for slide in self.slides:
            yield slide, starts
            starts += slide.minutes


def lecture_paths() -> list[Path]:
    return sorted(LECTURES.glob("stage_[0-9]*.md"))


def lecture_path(number: int) -> Path:
    """The file of the lecture on a stage. Raises ValueError if there is no such stage."""
    return LECTURES / f"stage_{load_stage(number).number}.md"


def read_lecture(path: Path) -> Lecture:
    """The lecture in that file. Raises LectureError for a mistake in a heading or a directive."""
    stage = load_stage(int(path.stem.split("_")[1]))
    minutes = 0.0
    slides: list[Slide] = []
    for piece in pieces(path):
        if piece.kind == "heading":
            slides.append(slide_of(path, piece, first=not slides))
        elif not slides:
            raise LectureError(path, piece.line, "a lecture begins with '# Title {1 min}'")
        elif piece.kind == "minutes":
            minutes = float(piece.text)
        elif piece.kind in SCRIPT:
            slides[-1].script.append(piece)
        elif slides[-1].script:
            raise LectureError(path, piece.line, "what the slide shows comes before the script (@say, @type, @see)")
        else:
            slides[-1].body.append(piece)
    return Lecture(path, stage, minutes, slides)


def slide_of(path: Path, piece: Piece, *, first: bool) -> Slide:
    match = HEADING.fullmatch(piece.text)
    if not match or (match[1] == "#") != first:
        raise LectureError(
            path, piece.line, f"{piece.text!r} is no '## Title {{2 min}}' or '## Title {{2 min, question}}'"
        )
    kind = "title" if first else match["kind"] or "plain"
    if kind not in KINDS:
        raise LectureError(path, piece.line, f"there is no kind of slide {kind!r}; there are {', '.join(KINDS[1:])}")
    return Slide(match["title"], float(match["minutes"]), kind, piece.line)


def split_words(text: str) -> tuple[str, ...]:
    """The words of a directive. Spaces separate them, "double quotes" join them, and an apostrophe is a letter."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.quotes, lexer.commenters = True, '"', ""
    return tuple(lexer)


def pieces(path: Path) -> Iterator[Piece]:
    """The pieces of the source in order. Fenced code is text, whatever its lines look like."""
    lines = path.read_text(encoding="utf-8").splitlines()
    text: list[str] = []
    kind, start, fence = "text", 1, ""
    for number, line in enumerate([*lines, "## end"], start=1):
        mark = None if fence else MARK.fullmatch(line)
        if mark is None or (kind == "type" and line.startswith("# ")):  # a comment, among what is to be typed
            if opened := FENCE.match(line):
                fence = "" if fence == opened[1] else fence or opened[1]
            text.append(line)
            continue
        if kind in SCRIPT or "".join(text).strip():
            yield Piece(kind, "\n".join(text).strip(), start)
        text, kind, start = [], "text", number + 1
        name, rest = mark["name"], mark["rest"] or ""
        if name in SCRIPT and not rest:
            kind, start = name, number
        elif name in SHOWN or (name == "minutes" and rest.isdecimal()):
            try:
                yield Piece(name, rest, number, split_words(rest))
            except ValueError as error:
                raise LectureError(path, number, f"@{name} {rest}: {error}") from error
        elif name:
            known = ", ".join(f"@{known}" for known in (*SHOWN, *SCRIPT, "minutes"))
            raise LectureError(path, number, f"{line!r} is no directive; there are {known}")
        elif number <= len(lines):
            yield Piece("|||" if line == "|||" else "heading", line, number)
    if fence:
        raise LectureError(path, start, f"a fence {fence} is opened and never closed")
