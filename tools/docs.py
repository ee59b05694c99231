"""Build the site into build/docs/html: `make docs`. Nothing is run anew, nothing is fetched, and a warning is an error.

What Sphinx reads is put together in build/docs/source: the pages of docs/, the notebooks with their stored outputs, a
page for each source file, and three pages made here: results (from benchmarks/results), API (from the docstrings) and
the states of sequences and blocks. Links to files of the repository become links to their pages.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.state_diagrams import START, Arrow, block_arrows, sequence_arrows

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "docs"
SHOWN = ("stages", "nanovllm", "examples")  # whose source files get pages
LINK = re.compile(r"\]\(\.\./([\w/.-]+)\)")


def page_of(path: str) -> str:
    """Where a file of the repository is on the site. Raises ValueError for one that has no page."""
    if not (ROOT / path).is_file():
        raise ValueError(f"a page links to {path}, and there is no such file")
    if path.startswith("notebooks/"):
        return f"/{path}"
    if path.endswith(".py") and path.split("/")[0] in SHOWN:
        return f"/source/{path.removesuffix('.py')}.md"
    raise ValueError(
        f"a page links to {path}, which is not on the site; link to {' or '.join(SHOWN)}, or to a notebook"
    )


def on_the_site(text: str) -> str:
    return LINK.sub(lambda m: f"]({page_of(m[1])})", text)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def source_pages(target: Path) -> None:
    names = []
    for package in SHOWN:
        for path in sorted((ROOT / package).rglob("*.py")):
            code = path.read_text(encoding="utf-8")
            if code.strip():
                name = path.relative_to(ROOT).as_posix()
                names.append(name.removesuffix(".py"))
                write(target / f"{names[-1]}.md", f"# `{name}`\n\n``````python\n{code}``````\n")
    listing = "\n".join(names)
    write(target / "index.md", f"# Source\n\n```{{toctree}}\n:maxdepth: 1\n\n{listing}\n```\n")


def states_tables() -> str:
    def table(title: str, arrows: set[Arrow]) -> str:
        rows = [f"| {a} | {b} | {label} |" for a, b, label in sorted(arrows) if START not in (a, b)]
        return "\n".join([f"### {title}", "", "| from | to | by |", "|---|---|---|", *rows, ""])

    return table("A sequence", sequence_arrows()) + "\n" + table("A KV block", block_arrows())


def results_page() -> str:
    from benchmarks import report
    from benchmarks.harness import RESULTS

    parts = ["# Results\n\nWritten from what was measured (`benchmarks/results`); nobody types a figure.\n"]
    for title, name in (("The stages", "stages"), ("One workload through all of them", "ladder")):
        parts.append(f"## {title}\n\n{report.table(name, RESULTS)}")
    for path in sorted(RESULTS.glob("stage_*.json")):
        result = report.load(path.stem, RESULTS)
        parts.append(f"## {result['title']}\n\n{report.table(path.stem, RESULTS)}")
    return "\n".join(parts)


def api_page() -> str:
    """Everything that `nanovllm` offers, with the docstrings of its public methods."""
    import nanovllm

    parts = ["# API\n\n`from nanovllm import ...`\n"]
    for name in sorted(nanovllm.__all__):
        thing: Any = getattr(nanovllm, name)
        if not inspect.isclass(thing):
            continue
        parts.append(f"## {name}\n\n{literal(thing)}")
        for method, function in vars(thing).items():
            if inspect.isfunction(function) and method[0] != "_" and function.__doc__:
                parts.append(f"### {name}.{method}\n\n{literal(function)}")
    return "\n".join(parts)


def literal(thing: Any) -> str:
    head = f"{thing.__name__}{inspect.signature(thing)}"
    return f"``````text\n{head}\n\n{inspect.cleandoc(thing.__doc__ or '')}\n``````\n"


def prepare(source: Path) -> None:
    """Put together all that Sphinx reads. Raises ValueError for a link that leads nowhere."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "docs", source)
    for page in source.glob("*.md"):
        text = on_the_site(page.read_text(encoding="utf-8"))
        page.write_text(text.replace("<!-- states -->", states_tables()), encoding="utf-8")
    (source / "notebooks").mkdir()
    for notebook in (ROOT / "notebooks").glob("[0-9]*.ipynb"):
        shutil.copy(notebook, source / "notebooks")
    source_pages(source / "source")
    write(source / "results.md", results_page())
    write(source / "api.md", api_page())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description="Build the site.")
    parser.add_argument("--out", type=Path, default=BUILD, help="directory for source and html (default: build/docs)")
    out: Path = parser.parse_args(arguments).out
    missing = [name for name in ("sphinx", "myst_nb", "sphinx_book_theme") if find_spec(name) is None]
    if missing:
        print(
            f"docs: {', '.join(missing)} not installed: {sys.executable} -m pip install -e '.[docs]'", file=sys.stderr
        )
        return 1
    prepare(out / "source")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", out / "source", out / "html"]
    code = subprocess.run([str(part) for part in command], cwd=ROOT, env=os.environ).returncode
    if code == 0:
        print(f"{out / 'html' / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
