"""Two stages next to each other: which units are new, changed, gone or kept, and which lines of them differ.

Classes, functions and methods are paired by name (the engines with each other), wherever they stand, so that moved code
is compared with what it was. What a stage takes unchanged from earlier ones is not in its file, and not in the diff.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from stages.manifest import Stage, load_stage
from tools.exercises.stage_units import DOCSTRING, IMPORTS, StageFile, Unit, find, find_in_base, reach, read_stage

CONTEXT = 3  # unchanged lines shown around a change


@dataclass(frozen=True)
class Block:
    """Lines `old` became lines `new`: equal (with `skipped` such lines left out before), or at least one is changed."""

    equal: bool
    old: range  # indices into the unit's lines
    new: range
    skipped: int = 0


@dataclass(frozen=True)
class Pair:
    """A unit of the stage and what it was before; one of them is None where something is new or gone."""

    old: Unit | None
    new: Unit | None

    def blocks(self) -> Iterator[Block]:
        if self.old is None or self.new is None:
            yield Block(
                False, range(len(self.old.lines) if self.old else 0), range(len(self.new.lines) if self.new else 0)
            )
            return
        end = 0
        for group in difflib.SequenceMatcher(None, self.old.lines, self.new.lines, False).get_grouped_opcodes(CONTEXT):
            for tag, i, i_stop, j, j_stop in group:
                yield Block(tag == "equal", range(i, i_stop), range(j, j_stop), max(0, j - end))
                end = j_stop
        if end < len(self.new.lines):
            last = len(self.new.lines)
            yield Block(True, range(len(self.old.lines), len(self.old.lines)), range(last, last), last - end)


@dataclass(frozen=True)
class StageDiff:
    stage: Stage
    file: StageFile
    before: StageFile | None
    pairs: list[Pair]  # everything new or changed, in the order of the file
    removed: list[Unit]  # what the stage before consisted of, and this one does not
    kept: dict[str, int]  # names of earlier stages that this one uses, and where they stand

    @property
    def added(self) -> list[Unit]:
        return [pair.new for pair in self.pairs if pair.new and not pair.old]

    @property
    def changed(self) -> list[Unit]:
        return [pair.new for pair in self.pairs if pair.new and pair.old and pair.new.key not in (DOCSTRING, IMPORTS)]


def compare(number: int) -> StageDiff:
    """Stage `number` against the one it builds on; stage 1 against nothing. Raises ValueError where there is none."""
    stage, file = load_stage(number), read_stage(number)
    if number == 1:
        return StageDiff(stage, file, None, [Pair(None, unit) for unit in file.units.values()], [], {})
    counterparts = {unit.key: counterpart(file, unit) for unit in file.units.values()}
    pairs = [
        Pair(old, unit)
        for unit in file.units.values()
        if (old := counterparts[unit.key]) is None or old.lines != unit.lines
    ]
    now = reach(number)
    replaced = {(old.stage, old.key) for old in counterparts.values() if old}
    gone = {
        u.key: u for where, u in sorted(reach(base_of(number)).items()) if where not in now and where not in replaced
    }
    removed = sorted((u for u in gone.values() if u.key not in file.units), key=lambda u: (u.stage, u.first_line))
    used = sorted(
        (u for u in now.values() if u.stage < number and "." not in u.key), key=lambda u: (u.stage, u.first_line)
    )
    return StageDiff(stage, file, read_stage(base_of(number)), pairs, removed, {u.label: u.stage for u in used})


def base_of(number: int) -> int:
    """The stage that a stage builds on: the one before, save for stage 7, which leaves stage 6 aside."""
    return int(load_stage(number).needs[0].removeprefix("stage "))


def counterpart(file: StageFile, unit: Unit) -> Unit | None:
    """What `unit` was before: the unit of that name, or for a method the one it overrides."""
    base = base_of(file.number)
    if found := find(base, unit.key):
        return found
    owner, dot, method = unit.key.partition(".")
    for parent in file.bases.get(owner, []) if dot else []:
        if overridden := find_in_base(file, parent, method):
            return overridden
    return next((u for u in reach(base).values() if u.key == unit.key), None)


def facts(diff: StageDiff) -> Iterator[tuple[str, str]]:
    """The same for terminal and HTML: pairs of a heading and a text, one item a line."""
    file, before = diff.file, diff.before
    yield "the idea", diff.stage.idea
    yield "removes", diff.stage.removes
    yield "costs", diff.stage.costs
    size = f"{file.num_lines} lines, {file.num_code_lines} of them code"
    yield "lines", size + (f" (stage {before.number}: {before.num_lines}, {before.num_code_lines})" if before else "")
    uses = [f"uses {path}: {', '.join(names)}" for path, names in file.relies_on.items()]
    yield "files", "\n".join([file.path, *uses])
    if before:
        new = [f"{u.label}: {u.summary}" if u.summary else u.label for u in without_methods(diff.added)]
        yield "new", "\n".join(new) or "nothing"
        yield "changed", ", ".join(u.label for u in diff.changed) or "nothing"
        yield "gone", ", ".join(u.label for u in without_methods(diff.removed)) or "nothing"
        yield "kept", ", ".join(f"{name} (stage {k})" for name, k in diff.kept.items()) or "nothing of earlier stages"


def without_methods(units: list[Unit]) -> list[Unit]:
    """Leave out the methods of classes that are listed themselves."""
    keys = {unit.key for unit in units}
    return [unit for unit in units if "." not in unit.key or unit.owner not in keys]


def title(pair: Pair) -> str:
    unit = pair.new or pair.old
    assert unit is not None
    if pair.old is None or pair.new is None:
        return f"{unit.label} ({'new' if pair.new else 'gone'})"
    since = f"changed since stage {pair.old.stage}"
    return f"{unit.label} ({since}{'' if pair.old.label == unit.label else f': {pair.old.label}'})"
