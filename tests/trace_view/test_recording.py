"""A recording survives the disk, and damage is told."""

import errno
import json
import os
from pathlib import Path

import pytest

from nanovllm import cli
from nanovllm.trace_view import Recording
from tests.trace_view.runs import crowded


def test_a_pipe_is_written_to_and_a_link_stays_a_link(tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "run.jsonl"
    os.mkfifo(pipe)
    link.symlink_to(file)
    both_ends = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # so that neither end waits for the other
    for path in pipe, link:
        Recording(title="short").save(path)
    assert os.read(both_ends, 2**16) == file.read_bytes() != b""
    os.close(both_ends)
    with (tmp_path / "link").open("ab") as shell:  # as with >>
        before = file.read_bytes()
        Recording(title="short").save(f"/dev/fd/{shell.fileno()}")
    assert file.read_bytes() == before * 2
    assert link.is_symlink() and pipe.is_fifo() and sorted(tmp_path.iterdir()) == [link, pipe, file]


def test_what_does_not_fit_on_the_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.raises(OSError, match="No space"):
        crowded().save(tmp_path / "run.jsonl")
    assert not list(tmp_path.iterdir())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    recording = crowded()
    for name in ("run.jsonl.gz", "run.jsonl"):
        recording.save(tmp_path / name)
        loaded = Recording.load(tmp_path / name)
        assert loaded.events == recording.events
        assert loaded.about == recording.about and loaded.about["title"] == "crowded"
    packed = (tmp_path / "run.jsonl.gz").read_bytes()
    assert len(packed) < (tmp_path / "run.jsonl").stat().st_size / 4
    for damaged in (packed[:-9], b"no gzip"):
        (tmp_path / "run.jsonl.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"run\.jsonl\.gz is no gzip file, or is cut short or damaged; record the"):
            Recording.load(tmp_path / "run.jsonl.gz")
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert len(lines) == 1 + len(recording.events) and all(isinstance(json.loads(line), dict) for line in lines)


HEAD, GOOD = '{"nanovllm_trace": 1}', '{"t": 0.0, "step": 1, "type": "preempted", "request": 0}'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no recording with events"),
        (HEAD, "no recording with events"),
        (GOOD, "no recording with events"),
        ('{"nanovllm_trace": 2}\n' + GOOD, "no recording with events"),
        ("[]\n" + GOOD, "no recording with events"),
        (f"{HEAD}\n{GOOD}\n{GOOD[:-9]}", r"line 3: no JSON"),
        (HEAD + '\n{"t": 0, "step": 1, "type": "token"}', r"line 2: an event has t, step, type, request"),
        (HEAD + "\n3", "line 2: an event has"),
    ],
)
def test_damage_is_told_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "run.jsonl").write_text(text)
    with pytest.raises(ValueError, match=complaint) as raised:
        Recording.load(tmp_path / "run.jsonl")
    assert "run.jsonl" in str(raised.value)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.jsonl"
    crowded().save(run)
    assert cli.main(["trace", "view", str(run), "--out", str(tmp_path / "other.html")]) == 0
    assert "crowded" in (tmp_path / "other.html").read_text()
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "other.html")]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [(["nowhere.jsonl"], "nowhere.jsonl"), (["RUN", "--tokenizer", "nowhere"], "no tokenizer.json in it")],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    crowded().save(tmp_path / "run.jsonl")
    arguments = [str(tmp_path / "run.jsonl") if a == "RUN" else a for a in arguments]
    assert cli.main(["trace", "view", *arguments]) == 1
    err = capsys.readouterr().err
    assert part in err and err.count("\n") == 1
