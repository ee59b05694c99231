"""The README: short, and what it shows of the engine is what the engine does."""

import re
import runpy
from functools import partial
from pathlib import Path

import pytest

import nanovllm

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES = 150


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def test_the_readme_links_to_files_that_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_notebook_is_linked_with_its_minutes() -> None:
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        found = re.search(rf"\]\(notebooks/{re.escape(notebook.name)}\)", README)
        assert found, notebook.name
        assert re.search(r"\d+ min", README[found.start() - 8 : found.end() + 120]), notebook.name


def test_the_example_of_the_readme_is_example_py_and_prints_what_the_readme_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = re.search(r"```python\n(?P<code>.*?)```\n\n```\n(?P<text>.*?)```", README, re.DOTALL)
    assert shown
    example = ROOT / "example.py"
    assert example.read_text(encoding="utf-8").endswith('"""\n\n' + shown["code"])
    monkeypatch.setattr("nanovllm.LLM", partial(nanovllm.LLM, kv_cache_gib=0.02), raising=False)
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.split() == shown["text"].split()
