"""The mutants: that the catalogue fits the stages, that the tool reports honestly, and that every mutant is caught."""

import pytest

from stages.manifest import Chapter, load_chapter, load_electives, load_stages
from tests.stage_jobs import Job, StageJobs
from tools.exercises import mutants
from tools.exercises.exercises import solution
from tools.exercises.mutants import Mutant, Verdict, load_mutants

STAGES = load_stages()
CHAPTERS: list[Chapter] = [*STAGES, *load_electives()]
by_slug = pytest.mark.parametrize("stage", CHAPTERS, ids=lambda stage: stage.slug)
# One per stage that is caught among the stage's own tests, which run before the others
SAMPLE = {
    "1": "not_causal",
    "2": "positions_restart",
    "3": "contiguous_blocks",
    "4": "count_not_raised",
    "5": "earliest_is_victim",
    "6": "padding_writes_to_block_0",
    "7": "bias_added_by_every_rank",
}


@by_slug
def test_a_catalogue_has_at_least_five_mutants_that_fit(stage: Chapter) -> None:
    found, source = load_mutants(stage), solution(stage)
    assert len(found) >= 5
    assert len({m.name for m in found}) == len(found)
    mutated = set()
    for m in found:
        assert m.mistake.endswith(".") and m.lesson.endswith(".") and m.name.isidentifier()
        text = m.apply(source)
        compile(text, m.name, "exec")
        mutated.add(text)
    assert len(mutated | {source}) == len(found) + 1, "two are the same, or one changes nothing"


@pytest.mark.parametrize("source", ["x = 1", "x = 2 + 2"])
def test_a_mutant_that_fits_nowhere_or_twice_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=f"mutant m: its old text occurs {source.count('2')} times"):
        Mutant("m", "", "2", "3", "").apply(source)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@by_slug
def test_every_mutant_is_caught(stage: Chapter, stage_jobs: StageJobs) -> None:
    jobs = [Job(m.name, stage.name, m.apply(solution(stage))) for m in load_mutants(stage)]
    results = stage_jobs.run(jobs, timeout=1100)
    survivors = [name for name, result in results.items() if result.test is None]
    assert not survivors, "no test notices these"
    if sample := SAMPLE.get(stage.name):
        found = results[sample].test
        assert found is not None and found.startswith(f"test_{stage.module_name}.py::")


# --- the report ------------------------------------------------------------------------------------------------------


def plant(monkeypatch: pytest.MonkeyPatch, caught: bool, baseline: str | None = None) -> None:
    """Let the tests of every stage be such that they notice all mutants, or none; `baseline` fails without any."""

    def run_tests(stage: Chapter, source: str) -> Verdict:
        test = "test_x.py::test_the_rule[stage4]" if caught else None
        return Verdict(baseline if source == solution(stage) else test, "why", 7)

    monkeypatch.setattr(mutants, "run_tests", run_tests)
    monkeypatch.setenv("COLUMNS", "200")


def test_a_narrow_terminal_cuts_no_name_in_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, caught=True)
    monkeypatch.setenv("COLUMNS", "80")
    assert mutants.main(["6"]) == 0
    out = capsys.readouterr().out
    assert all(f" {m.name} " in out for m in load_mutants(load_chapter("6"))) and " test_the_rule " in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_table_names_the_test_and_the_lesson(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, caught=True)
    assert mutants.main(["4"]) == 0
    out = capsys.readouterr().out
    assert out.count("test_the_rule") == len(load_mutants(load_chapter("4"))) and "Every one of them was caught." in out
    assert "hash_forgets_parent" in out and "Equal blocks after different" in out


def test_a_survivor_is_shown_and_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, caught=False)
    assert mutants.main(["4", "--only", "count_not_raised", "one_byte_per_token"]) == 1
    out = capsys.readouterr().out
    assert out.count("survives 7 tests") == 2 and "2 of them survived" in out and "old_name_stays" not in out


def test_tests_that_fail_anyway_prove_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, caught=True, baseline="test_x.py::test_broken")
    assert mutants.main(["4"]) == 2
    assert "without any mutant test_x.py::test_broken fails already: why" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["99"], "no stage 99"), (["4", "--only", "x"], "no mutant x"), (["fp7"], "no elective 'fp7'")],
)
def test_what_is_not_there_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(arguments) == 2
    assert message in capsys.readouterr().err
