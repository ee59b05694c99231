"""The lecture kit: nothing on a slide can grow old unseen, and lectures take the time they say."""

import ast
import html.parser
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
from pygments.styles import get_style_by_name  # type: ignore[import-untyped]

from tests.contrast import contrast
from tests.in_words import in_words
from tools.exercises.exercises import find_holes
from tools.lectures import lecture, pulls, slides
from tools.lectures.lecture import ROOT, Lecture, LectureError, lecture_paths, read_lecture
from tools.lectures.pulls import EXPERIMENTS, experiments, printed_by
from tools.lectures.slides import render
from tools.pictures.colours import rgb

PATHS = lecture_paths()
by_lecture = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
STAGE_4 = "stages/stage_4_prefix_caching.py"
NOTEBOOK_4 = "notebooks/4_prefix_caching.ipynb"
MEASURED = ("table", "output", "printed", "picture")
TARGETS = re.findall(r"^([a-z][\w%-]*):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
RUNS = re.compile(r"^make (stage-\d-demo|race|replay)|^\.venv/bin/python$", re.MULTILINE)
TYPED_FIGURE = re.compile(r"\d\s?(?:ms|µs|tokens/s|GB/s|×|%|times sooner)(?!\w)")

SMALL = """\
# A title {1 min}
@minutes 21
Words.
@say
Hello.
## How much? {9 min, question}
Guess.
@choices hardly | *{{gain stage_4 turns}} | 50 times
@say
Wait.
@type
make stage-4-demo
## So much {11 min, answer}
@table stage_4 turns
@say
Look.
"""


class Parts(html.parser.HTMLParser):
    """Addresses that a browser would load, texts of alternatives, and what is in no script or style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.alternatives: list[str] = []
        self.sections = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.addresses += [values[name] for name in ("src", "href", "action", "data", "srcset") if name in values]
        self.alternatives += [values.get("alt", "")] if tag == "img" else []
        self.sections += tag == "section"


def written(directory: Path, text: str) -> Path:
    path = directory / "stage_4.md"
    path.write_text(text, encoding="utf-8")
    return path


def complaint(path: Path) -> str:
    with pytest.raises(LectureError) as raised:
        render(read_lecture(path))
    return str(raised.value)


@by_lecture
def test_a_lecture_can_be_given(path: Path) -> None:
    given = read_lecture(path)
    total = sum(slide.minutes for slide in given.slides)
    assert 43 <= total <= 47 if given.stage.number == 4 else 20 <= total <= 45
    kinds = [slide.kind for slide in given.slides]
    assert kinds.count("question") >= 2 and "live" in kinds
    holes = find_holes((ROOT / "stages" / f"{given.stage.module_name}.py").read_text(encoding="utf-8"))
    shown = [piece.words[1] for slide in given.slides for piece in slide.body if piece.kind == "hole"]
    assert set(shown) <= {hole.name for hole in holes} and shown == sorted(shown)


def faults(given: Lecture) -> Iterator[str]:
    """What is wrong with a lecture that can be read, with the line."""
    total = sum(slide.minutes for slide in given.slides)
    if total != given.minutes:
        yield f"1: {total:g} minutes, and {given.minutes:g} are promised"
    if not any(RUNS.search(piece.text) for slide in given.slides for piece in slide.script if piece.kind == "type"):
        yield "1: nothing runs before the audience: @type make stage-N-demo, race or replay, or a session of Python"
    for slide, after in zip(given.slides, [*given.slides[1:], None], strict=True):
        if not any(piece.kind == "say" and piece.text for piece in slide.script):
            yield f"{slide.line}: nothing to say (@say) about {slide.title!r}"
        yield from (f"{piece.line}: @{piece.kind} with nothing under it" for piece in slide.script if not piece.text)
        if (slide.kind == "question") != (after is not None and after.kind == "answer"):
            yield f"{slide.line}: a question slide is followed by its answer slide, and no other slide is"
        if slide.kind == "question" and not any(piece.kind == "choices" for piece in slide.body):
            yield f"{slide.line}: a question has answers to choose from (@choices)"
        measured = any(piece.kind in MEASURED or "{{" in piece.text for piece in slide.body)
        if slide.kind == "answer" and not measured:
            yield f"{slide.line}: an answer shows what was measured: {', '.join(MEASURED)} or {{{{...}}}}"
        for piece in (*slide.body, *slide.script):
            names = re.findall(r"\bmake ([a-z][\w-]*)", piece.text) if piece.kind in ("run", "type") else ()
            for name in names:
                if re.sub(r"\d+", "%", name) not in TARGETS:
                    yield f"{piece.line}: the Makefile has no target {name}"


@by_lecture
def test_a_lecture_keeps_the_rules(path: Path) -> None:
    assert list(faults(read_lecture(path))) == []


@by_lecture
def test_its_page_asks_for_nothing(path: Path) -> None:
    given = read_lecture(path)
    text = render(given)
    parts = Parts(text)
    assert parts.sections == len(given.slides)
    assert [a for a in parts.addresses if not a.startswith("data:")] == []
    assert all(parts.alternatives)
    assert not re.search(r"@import|url\(\s*[\"']?(?:https?:)?//", text)
    assert "{{" not in text.replace("{{}}", "").split("<script>")[0]


@by_lecture
def test_no_measured_figure_is_typed(path: Path) -> None:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("@choices"):  # of which only the right one has been measured
            line = line.partition("*")[2].partition(" | ")[0]
        assert not TYPED_FIGURE.search(re.sub(r"\{\{.*?\}\}", "", line)), (
            f"{path.name}:{number}: fetch it with {{{{...}}}}"
        )


@by_lecture
def test_the_run_sheet_has_every_word_and_ends_on_time(path: Path) -> None:
    given = read_lecture(path)
    sheet = "\n".join(slides.run_sheet(given))
    clocks = re.findall(r"^(\d\d):(\d\d)  ", sheet, re.MULTILINE)
    assert len(clocks) == len(given.slides) + 1 and clocks == sorted(clocks)
    assert int(clocks[-1][0]) == int(sum(slide.minutes for slide in given.slides))
    said = sum(len(piece.text.split()) for slide in given.slides for piece in slide.script if piece.kind == "say")
    assert said / given.minutes < 90, "words a minute; there must be time to think and to type"


@by_lecture
def test_what_is_typed_is_the_solution(path: Path) -> None:
    given = read_lecture(path)
    source = (ROOT / "stages" / f"{given.stage.module_name}.py").read_text(encoding="utf-8")
    live = [slide for slide in given.slides if slide.kind == "live"]
    for hole, slide in zip(find_holes(source), live, strict=True):
        [typed] = [piece.text for piece in slide.script if piece.kind == "type"]
        code = "\n".join(line for line in typed.splitlines() if not line.startswith(("#", "make ")))
        solution = textwrap.dedent("\n".join(source.splitlines()[hole.code : hole.end]))
        assert ast.dump(ast.parse(code)) == ast.dump(ast.parse(solution)), f"what is typed for {hole.name} differs"


@by_lecture
def test_what_is_typed_exists(path: Path) -> None:
    """Checkpoints that the exercise has, and tests that there are to be chosen by name."""
    given = read_lecture(path)
    tests = list((ROOT / "tests" / "stages").glob("test_*.py"))
    names = [file.stem for file in tests]
    names += [name for file in tests for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8"))]
    typed = "\n".join(piece.text for slide in given.slides for piece in slide.script if piece.kind == "type")
    for expression in re.findall(r"-k (?:\'([^\']+)\'|(\w+))", typed):
        for word in re.split(r" or | and ", "".join(expression)):
            assert any(word in name for name in names), f"no test is called like {word!r}"
    live = [slide for slide in given.slides if slide.kind == "live"]
    checkpoints = re.findall(rf'make stage-{given.stage.number}-exercise ARGS="--checkpoint (\d)"', typed)
    assert checkpoints == [str(i + 2) for i in range(len(live))]


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("Words.", f"@code {STAGE_4} no_such_thing", 3, "nothing is called no_such_thing"),
        ("Words.", "@code stages/no_such.py f", 3, "there is no file stages/no_such.py"),
        ("Words.", f"@hole {STAGE_4} 4.9", 3, "has no exercise 4.9; it has 4.1"),
        ("Words.", f'@code {STAGE_4} chained_digest from "nothing"', 3, "no line with 'nothing'"),
        ("Words.", f"@code {STAGE_4} chained_digest upwards", 3, "'upwards' is neither"),
        ("Words.", f"@code {STAGE_4} PrefixCachingPool", 3, "too much for a slide"),
        ("Words.", f'@picture {NOTEBOOK_4} "import json" A picture', 3, "has no picture"),
        ("Words.", f'@picture {NOTEBOOK_4} "ref_counts(run"', 3, "@picture does not take"),
        ("Words.", f'@output {NOTEBOOK_4} "PrefixCachingEngine"', 3, "cells of notebooks/4_prefix"),
        ("Words.", "@table stage_4 no_such_key", 3, "stage_4 has no figure 'no_such_key'; it has turns"),
        ("Words.", "It is {{gain stage_4 nothing}}.", 3, "no figure 'nothing'"),
        ("Words.", "It is {{nonsense}}.", 3, "'nonsense' is none of"),
        ("Words.", "It is {{model colour}}.", 3, "has no whole number 'colour'"),
        ("Words.", f'It is {{{{found {NOTEBOOK_4} "no_chain = patch" "gnu"}}}}.', 3, "has nothing like 'gnu'"),
        ("Words.", "@printed no_such", 3, "there is no lectures/experiments/no_such.txt"),
        ("Words.", '@printed stage_1_no_mask "unicorn"', 3, "no_mask printed nothing like 'unicorn'"),
        ("Words.", "@dance", 3, "'@dance' is no directive; there are @code"),
        ("Words.", "```python\nx = 1", 3, "never closed"),
        ("Hello.", "Hello.\n|||", 6, "comes before the script"),
        ("*{{", "{{", 8, "@choices has one right answer (*) among several others, unlike hardly | "),
        ("| 50", "| *50", 8, "@choices has one right answer (*) among several"),
        ("| 50 times", "| hardly", 8, "@choices has one right answer (*) among several others"),
        ("{9 min, question}", "{9 min, riddle}", 6, "no kind of slide 'riddle'"),
        ("{9 min, question}", "", 6, "is no '## Title {2 min}'"),
    ],
)  # fmt: skip
def test_a_damaged_source_is_an_error_with_file_and_line(
    tmp_path: Path, old: str, new: str, line: int, message: str
) -> None:
    assert old in SMALL
    found = complaint(written(tmp_path, SMALL.replace(old, new, 1)))
    assert found.startswith(f"{tmp_path / 'stage_4.md'}:{line}: ") and message in found, found


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("Hello.", "Hello.\n@type", "6: @type with nothing under it"),
        ("@say\nHello.\n", "", "1: nothing to say"),
        ("Words.", "@run make stage-4-dance", "3: the Makefile has no target stage-4-dance"),
        ("Hello.", "Hello.\n@type\nmake dance", "6: the Makefile has no target dance"),
        ("@minutes 21", "@minutes 22", "1: 21 minutes, and 22 are promised"),
        ("make stage-4-demo", "make test", "1: nothing runs before the audience"),
        ("@choices hardly | *{{gain stage_4 turns}} | 50 times\n", "", "6: a question has answers to choose from"),
        ("{9 min, question}", "{9 min}", "6: a question slide is followed by its answer slide"),
        ("{11 min, answer}", "{11 min}", "6: a question slide is followed by its answer slide"),
        ("@table stage_4 turns", "It is large.", "13: an answer shows what was measured"),
    ],
)
def test_the_rules_bite(tmp_path: Path, old: str, new: str, fault: str) -> None:
    assert old in SMALL
    broken = list(faults(read_lecture(written(tmp_path, SMALL.replace(old, new, 1)))))
    assert any(found.startswith(fault) for found in broken), broken


def test_a_sound_source_is_none(tmp_path: Path) -> None:
    sound = read_lecture(written(tmp_path, SMALL))
    text = render(sound)
    assert list(faults(sound)) == []
    assert pulls.pull_gain("stage_4", "turns") in text and 'data-timing="660"' in text


def test_code_is_the_stage_s_own_and_a_hole_hides_the_solution() -> None:
    solved = pulls.pull_code(STAGE_4, "4.4")
    opened = pulls.pull_code(STAGE_4, "4.4", opened=True)
    source = (ROOT / STAGE_4).read_text(encoding="utf-8")
    assert all(line.strip() in source for line in solved.lines)
    assert not any("exercise" in line or '"""' in line for line in solved.lines)
    assert "for block in reversed(seq.block_table):" in solved.lines[min(solved.marked)]
    assert not any("reversed" in line for line in opened.lines) and any("4.4: lower the" in x for x in opened.lines)
    assert solved.label == "stage_4_prefix_caching.py · PrefixCachingPool.release"
    part = pulls.pull_code(STAGE_4, "4.4", "from", "for block", "to", "for block")
    assert part.lines[0].startswith("for block") and len(part.lines) == len(part.marked) == 1


def variables(mode: str) -> dict[str, str]:
    """The colours of the theme by day or by night, by name."""
    blocks = re.findall(
        r"(:root|\[data-theme=\"dark\"\]) \{(.*?)\}", (lecture.LECTURES / "slides.css").read_text(), re.DOTALL
    )
    return dict(re.findall(r"--([\w-]+): (#\w{6})", dict(blocks)[mode]))


@pytest.mark.parametrize(("mode", "style"), [(":root", slides.DAY), ('[data-theme="dark"]', slides.NIGHT)])
def test_code_can_be_read_on_its_paper(mode: str, style: str) -> None:
    """Every colour that the stages' code has on a slide, plain and marked."""
    theme = variables(mode)
    shown = "".join((ROOT / "stages" / f"{read_lecture(path).stage.module_name}.py").read_text() for path in PATHS)
    kinds = {kind for kind, _ in get_lexer_by_name("python").get_tokens(shown)}
    colours = {
        kind: f"#{get_style_by_name(style).style_for_token(kind)['color'] or theme['ink'][1:]}" for kind in kinds
    }
    assert len(set(colours.values())) > 5
    for paper in (theme["panel"], theme["mark"]):
        for kind, colour in colours.items():
            hinted = paper == theme["mark"] and str(kind) in ("Token.Comment.Single", "Token.Operator")
            assert contrast(rgb(theme["hint"] if hinted else colour), rgb(paper)) >= 4.5, (kind, colour, paper)


def test_what_is_said_in_words_and_what_is_found() -> None:
    spoken = [in_words(n) for n in (0, 13, 40, 95, 100, 113, 504, 1000, 2224, 127_750)]
    assert spoken == [
        *("zero", "thirteen", "forty", "ninety-five", "a hundred", "a hundred and thirteen", "five hundred and four"),
        *("a thousand", "two thousand two hundred and twenty-four"),
        "a hundred and twenty-seven thousand seven hundred and fifty",
    ]
    with pytest.raises(ValueError, match="no number to be spoken"):
        in_words(1_000_000)
    notebook = ("notebooks/1_naive.ipynb", "steps = [e")
    assert pulls.pull_found(*notebook, r"(\S+) in all") == "1,548"
    assert pulls.pull_printed("stage_1_no_mask", "penguin").strip().startswith("morning.")
    assert pulls.pull_inline(["model", "vocab_size"]) == "4,096"


def test_every_experiment_has_its_output_stored() -> None:
    paths = experiments()
    assert paths and {path.stem for path in EXPERIMENTS.iterdir() if path.is_file()} == {path.stem for path in paths}
    assert all(path.with_suffix(".txt").is_file() for path in paths)


@pytest.mark.slow
@pytest.mark.parametrize("path", experiments(), ids=lambda path: path.stem)
def test_an_experiment_prints_what_is_stored(path: Path) -> None:
    assert printed_by(path) == path.with_suffix(".txt").read_text(encoding="utf-8")


def test_lines_can_break_and_code_on_a_slide_is_of_one_size(tmp_path: Path) -> None:
    two = f"@code {STAGE_4} PrefixCachingEngine.step\n@code {STAGE_4} PrefixCachingEngine.start_batch\n@run make test"
    text = render(read_lecture(written(tmp_path, SMALL.replace("Words.", two))))
    sizes = re.findall(r'<pre class="code" style="--size: ([\d.]+)px"', text)
    assert len(sizes) == 2 and len(set(sizes)) == 1
    assert re.search(r'<span class="line" style="--margin: 8ch">        .*popleft', text)
    assert '<span class="line" style="--margin: 0ch">$ make test\n</span></pre>' in text


def test_pieces_of_code_that_would_not_fit_below_each_other_are_smaller(tmp_path: Path) -> None:
    def size_of(piece: str) -> float:
        text = render(read_lecture(written(tmp_path, SMALL.replace("Words.", piece))))
        return float(re.findall(r'<pre class="code" style="--size: ([\d.]+)px"', text)[0])

    piece = f"@code {STAGE_4} PrefixCachingPool.release"
    assert size_of("\n".join([piece] * 4)) < size_of(piece)


def test_a_fence_keeps_what_looks_like_a_directive(tmp_path: Path) -> None:
    given = read_lecture(written(tmp_path, SMALL.replace("Words.", "```text\n@code here\n## there\n```")))
    assert "@code here" in given.slides[0].body[0].text and "## there" in given.slides[0].body[0].text


def test_the_tool_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert slides.main(["--stage", "99", "--out", str(tmp_path)]) == 1
    assert "there is no stage 99" in capsys.readouterr().err
    assert slides.main(["--stage", "4", "--out", str(tmp_path)]) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"index.html", "launches.html", "race.html", "stage_4.html", "step.html"}
    for path in PATHS:
        assert f"{path.stem}.html" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_who_reads_the_beginning_of_a_script_sees_no_traceback() -> None:
    command = f"{sys.executable} -m tools.lectures.slides --script 4 | head -n 2"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("Stage 4: Prefix caching (22 slides")


def test_every_lecture_is_a_stage_s() -> None:
    lectures: list[Lecture] = [read_lecture(path) for path in PATHS]
    assert 4 in {given.stage.number for given in lectures}
    assert {path.name for path in lecture.LECTURES.glob("*.md")} == {
        "README.md",
        "exercises.md",
        *(path.name for path in PATHS),
    }
