"""The stages' diffs: what is paired with what, what is listed, and that both renderings hold the code of the stage."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from stages.manifest import load_stages
from tools import ROOT
from tools.exercises import stage_diff
from tools.exercises.stage_diff import Pair, StageDiff, Unit, compare, count_code_lines, find, page, read_stage

NUMBERS = [stage.number for stage in load_stages()]
VOID = {"meta", "br", "hr"}


class Page(HTMLParser):
    """Checks that elements close in order, and keeps the text and every address that is mentioned."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.addresses: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def was(diff: StageDiff) -> dict[str, str | None]:
    return {pair.new.label: pair.old.label if pair.old else None for pair in diff.pairs if pair.new}


def unit(*lines: str) -> Unit:
    return Unit(1, "f", "f", 11, lines, "", frozenset())


@pytest.mark.parametrize("number", NUMBERS)
def test_the_units_of_a_stage_are_its_whole_file(number: int) -> None:
    file = read_stage(number)
    lines = (ROOT / file.path).read_text(encoding="utf-8").splitlines()
    for u in file.units.values():
        assert tuple(lines[u.first_line - 1 : u.first_line - 1 + len(u.lines)]) == u.lines
    in_units = [line for u in file.units.values() for line in u.lines if line.strip()]
    assert in_units == [line for line in lines if line.strip()]


def test_the_first_stage_is_shown_whole() -> None:
    diff = compare(1)
    assert diff.before is None and not diff.removed and not diff.changed
    docstring, imports, *code = read_stage(1).units.values()
    assert [pair.new for pair in diff.pairs] == [*code, docstring, imports]


def test_engines_are_paired_whatever_their_names() -> None:
    assert was(compare(2))["KVCacheEngine.generate"] == "NaiveEngine.generate"
    assert was(compare(3))["PagedEngine.generate"] == "KVCacheEngine.generate"


def test_a_method_is_paired_with_what_it_overrides_or_the_engine_before_inherited() -> None:
    assert was(compare(4))["PrefixCachingPool.allocate"] == "BlockPool.allocate"
    assert was(compare(4))["PrefixCachingEngine.step"] == "PagedEngine.step"
    # Stage 4 does not write `generate`; it inherits stage 3's
    assert was(compare(5))["ContinuousBatchingEngine.generate"] == "PagedEngine.generate"
    assert was(compare(5))["ContinuousBatchingEngine.step"] == "PrefixCachingEngine.step"


def test_a_stage_is_compared_with_the_one_it_builds_on() -> None:
    diff = compare(7)
    assert diff.before and diff.before.number == 5
    assert was(diff)["TensorParallelEngine.run"] == "ContinuousBatchingEngine.run"
    assert not any(unit.label.startswith("CUDAGraph") for unit in diff.removed)


def test_what_is_new_gone_and_kept() -> None:
    diff = compare(5)
    listed = dict(diff.facts())
    assert {"Scheduled", "Scheduler"} <= {u.label for u in diff.added}
    assert "Scheduler: Who computes" in listed["new"] and "Scheduler.schedule" not in listed["new"]
    assert {"PagedEngine.admit", "PagedEngine.finish_batch"} <= {u.label for u in diff.removed}
    assert diff.kept["make_batch"] == 3 and diff.kept["PrefixCachingPool"] == 4
    assert not {"Scheduler", "PagedEngine"} & diff.kept.keys()
    assert "stages/stage_3_paged_blocks.py: PagedKVCache" in listed["files"]
    assert listed["the idea"] == diff.stage.idea
    assert {"KVCache", "KVCacheEngine.decode"} <= {u.label for u in compare(3).removed}


def test_code_lines_are_neither_blank_nor_comment_nor_docstring() -> None:
    source = (
        '"""Doc.\n\nmore\n"""\n\nx = """two\nlines"""  # three\n\n\ndef f():\n    """Doc."""\n    # why\n    return 1\n'
    )
    assert count_code_lines(source) == 4


def test_only_changes_and_their_surroundings_are_shown() -> None:
    old = [f"line {i}" for i in range(30)]
    pair = Pair(unit(*old), unit(*old[:10], "another", *old[11:], "the end"))
    assert pair.title == "f (changed since stage 1)"
    blocks = list(pair.blocks())
    changed = [(list(b.old), list(b.new)) for b in blocks if not b.equal]
    assert changed == [([10], [10]), ([], [30])]
    equal = [i for b in blocks if b.equal for i in b.new]
    assert equal == [7, 8, 9, 11, 12, 13, 27, 28, 29]
    assert sum(b.skipped for b in blocks) + len(equal) + 2 == 31


def test_what_is_left_out_at_the_end_is_counted() -> None:
    old = [f"line {i}" for i in range(30)]
    blocks = list(Pair(unit(*old), unit("first", *old[1:])).blocks())
    assert [b.skipped for b in blocks] == [0, 0, 26]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_page_is_whole_and_loads_nothing(number: int) -> None:
    html = page(compare(number))
    parsed = Page(html)
    assert parsed.addresses == [] and not re.search(r"https?://|@import|url\(|<script|<link", html)
    assert "prefers-color-scheme: light" in html and 'name="viewport"' in html
    shown = [line[7:].rstrip() for line in parsed.text.splitlines()]  # behind number and sign
    diff = compare(number)
    for whole in [*diff.added, *diff.removed]:
        assert any(shown[i : i + len(whole.lines)] == list(whole.lines) for i in range(len(shown))), whole.label


def test_the_terminal_shows_the_change_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    target = tmp_path / "deep" / "d.html"
    assert stage_diff.main(["4", "--html", str(target)]) == 0
    out = capsys.readouterr().out
    assert target.read_text(encoding="utf-8") == page(compare(4))
    for heading in ("the idea", "lines", "files", "new", "changed", "gone", "kept"):
        assert re.search(rf"^{heading} ", out, re.MULTILINE)
    old, new = find(3, "engine.make_pool"), find(4, "engine.make_pool")
    assert old and new
    [line] = [line for line in out.splitlines() if old.lines[1].strip() in line and new.lines[1].strip() in line]
    assert re.search(rf"^ *{old.first_line + 1} .*{new.first_line + 1} ", line)
    assert all(len(line) <= 200 for line in out.splitlines() if not line.startswith("The same"))


def test_a_narrow_terminal_shows_old_above_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert stage_diff.main(["4", "--html", str(tmp_path / "d.html")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("The same"))
    old, new = find(3, "engine.make_pool"), find(4, "engine.make_pool")
    assert old and new
    gone = next(i for i, line in enumerate(lines) if line.startswith(f"{old.first_line + 1:>4} - {old.lines[1]}"))
    assert any(line.startswith(f"{new.first_line + 1:>4} + {new.lines[1]}") for line in lines[gone:])


@pytest.mark.parametrize("number", NUMBERS)
def test_code_comes_before_docstring_and_imports(number: int) -> None:
    keys = [pair.new.key for pair in compare(number).pairs if pair.new]
    assert keys[-2:] == ["docstring", "imports"] and "docstring" not in keys[:-2]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell's pipes")
def test_a_reader_that_has_seen_enough_is_no_failure() -> None:
    command = f"{sys.executable} -m tools.exercises.stage_diff 5; echo status $? >&2"
    done = subprocess.run(
        ["sh", "-c", f"({command}) | head -n 1"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.count("\n") == 1 and done.stderr == "status 0\n"


def test_a_stage_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert stage_diff.main(["99"]) == 1
    assert "there is no stage 99" in capsys.readouterr().err
