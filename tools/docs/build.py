"""Build the site into build/docs/html: `make docs`. No notebook is run, and a warning is an error. Nothing is fetched
but Pyodide, once, for the page on which the scheduler runs.

Sphinx reads what is put together in build/docs/source: the pages of docs/, the notebooks with their stored outputs, a
page for each source file of SHOWN and for each other source file that a page names, and what is made from the code. The
lectures with their films, and the page of a trace, are beside them, each as it is elsewhere.
Links to files of the repository become links to their pages, and so do names of files in the text.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from nanovllm.trace_view import Recording, page
from stages.manifest import load_stages
from tools import ROOT
from tools.lectures import slides
from tools.lectures.lecture import lecture_paths, read_lecture
from tools.race.replay import DEFAULT
from tools.race.workload import EngineRun, load_race
from tools.scheduler_page import build as scheduler_page

BUILD = ROOT / "build" / "docs"
SHOWN = ("stages", "nanovllm", "examples")  # every source file in these folders has a page
NAMED = (*SHOWN, "tests", "tools", "benchmarks")  # a source file in these has a page if a page names the file
LANGUAGES = {".py": "python", ".sh": "sh", ".txt": "text"}  # of source files that may have a page
LINK = re.compile(r"\]\(\.\./([\w/.-]+)\)")
FILE = re.compile(rf"(?<![\[`])`((?:{'|'.join(NAMED)})/[\w/]+\.py)`(?![\]`])")
FORMULA = re.compile(r"(?<![\w`$\\])\$(?=\S)([^$`\n]+?)(?<=\S)\$(?![\w$])")
SPELLED = {"\\min": "min", "\\max": "max", "\\sum": "Σ", "\\dots": "…", "\\,": "\u2009", "-": "−"}


class Site:
    """Turns names of files into links, and collects the source files that need a page."""

    def __init__(self) -> None:
        self.sources = {
            path.relative_to(ROOT).as_posix() for package in SHOWN for path in (ROOT / package).rglob("*.py")
        }

    def page_of(self, path: str) -> str:
        """The address on the site of a file of the repository. Raises ValueError for a file without a page."""
        if not (ROOT / path).is_file():
            raise ValueError(f"a page links to {path}, and there is no such file")
        if path.startswith(("notebooks/", "docs/")):
            return f"/{path.removeprefix('docs/')}"
        if Path(path).suffix in LANGUAGES and path.split("/")[0] in NAMED:
            self.sources.add(path)
            return f"/source/{Path(path).with_suffix('.md').as_posix()}"
        raise ValueError(
            f"a page links to {path}, which is not on the site; link to {' or '.join(NAMED)}, or to a notebook"
        )

    def linked(self, text: str) -> str:
        """The text with a link wherever it names a file of the repository."""
        text = LINK.sub(lambda m: f"]({self.page_of(m[1])})", text)
        return FILE.sub(lambda m: f"[`{m[1]}`]({self.page_of(m[1])})" if (ROOT / m[1]).is_file() else m[0], text)

    def notebook(self, notebook: dict[str, Any]) -> dict[str, Any]:
        """The notebook for the site: with links, a text for each picture, and the code folded that imports or draws."""
        codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for cell in codes:
            if cell is codes[0] or any("image/png" in output.get("data", {}) for output in cell.get("outputs", ())):
                cell["metadata"]["tags"] = ["hide-input"]
        for cell in notebook["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                cell["source"] = self.linked(FORMULA.sub(lambda m: formula(m[1]), source))
            for output in cell.get("outputs", ()):
                if "image/png" in output.get("data", {}):
                    about = output.get("metadata", {}).get("image/png", {})
                    words = about.get("alt", "The picture that the cell draws")
                    cell["metadata"]["mystnb"] = {"image": {"alt": words}}
        return notebook

    def source_pages(self, target: Path) -> None:
        folders = dict.fromkeys(str(Path(name).parent) for name in sorted(self.sources))
        for name in self.sources:
            code = (ROOT / name).read_text(encoding="utf-8")
            if code.strip():
                write(
                    (target / name).with_suffix(".md"),
                    f"# `{name}`\n\n``````{LANGUAGES[Path(name).suffix]}\n{code}``````\n",
                )
        lists = (f"```{{toctree}}\n:caption: {folder}\n:maxdepth: 1\n:glob:\n\n{folder}/*\n```\n" for folder in folders)
        write(target / "index.md", "# Source\n\nEvery file that these pages speak of.\n\n" + "\n".join(lists))


def formula(tex: str) -> str:
    """A short TeX formula as HTML, which needs no script. Raises ValueError for a command that is not in SPELLED."""
    text = re.sub(r"\^(?:\{([^}]*)\}|(\w))", lambda m: f"<sup>{m[1] or m[2]}</sup>", tex.replace("<", "&lt;"))
    text = re.sub(r"(?<![\w\\&<])(?<!</)[A-Za-z](?![\w>])", r"<i>\g<0></i>", text)
    for command, sign in SPELLED.items():
        text = text.replace(command, sign)
    if "\\" in text:
        raise ValueError(f"${tex}$ has a command that the site cannot show; known are {', '.join(SPELLED)}")
    return text


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def ladder() -> str:
    """The table of the stages, from the manifest: chapter, file, idea, and what still hurts."""
    rows = ["| stage | the new idea | what still hurts |", "|---|---|---|"]
    for s in load_stages():
        chapter = f"**[{s.number}. {s.title}](../notebooks/{s.number}_{s.slug}.ipynb)**"
        rows.append(f"| {chapter}<br>[source](../stages/{s.module_name}.py) | {s.idea} | {s.costs} |")
    return "\n".join(rows) + "\n"


def rooms() -> str:
    """How large each room is. The package's rooms are its folders, the others count as one each."""
    others = [ROOT / name for name in ("stages", "training", "benchmarks", "tools", "tests")]
    package = ROOT / "nanovllm"
    rows = ["| room | files | lines |", "|---|--:|--:|"]
    inner = sorted({path.parent for path in package.glob("*/*.py")})
    for folder in [package, *inner, *others]:
        files = list(folder.glob("*.py") if folder == package else folder.rglob("*.py"))
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        rows.append(f"| `{folder.relative_to(ROOT).as_posix()}/` | {len(files)} | {lines:,} |")
    return "\n".join(rows) + "\n"


def commands_page() -> str:
    """The page of commands: the targets of the Makefile, and the program `nanovllm`."""
    from nanovllm.cli import parser

    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z%-]+):.*## (.*)", makefile, re.MULTILINE)
    rows = [f"| `make {name.replace('%', 'N')}` | {what} |" for name, what in targets]
    additions = re.findall(r"^#   (\S.*?)  +(.*)", makefile, re.MULTILINE)
    given = [f"| `{addition}` | {what} |" for addition, what in additions]
    usage = parser()
    usage.prog = "nanovllm"
    return "\n".join(
        [
            "# Commands\n\n## make\n\nEvery target does its own set-up into `.venv`. N is the number of a stage.\n",
            "| command | what it does |\n|---|---|", *rows,
            "\nWhat can be added, as in `make test JOBS=4`:\n\n| addition | what it does |\n|---|---|", *given,
            "\n## nanovllm\n\nIn `.venv/bin`; `nanovllm COMMAND --help` says more of each.\n",
            f"``````text\n{usage.format_help().strip()}\n``````\n",
        ]
    )  # fmt: skip


def filled(text: str) -> str:
    """A page with tables and diagrams in the place of the comments that name them."""
    text = text.replace("<!-- ladder -->", ladder()).replace("<!-- rooms -->", rooms())
    return re.sub(r"<!-- diagram: (\w+) -->\n", lambda m: diagram(m[1]), text)


def diagram(name: str) -> str:
    """docs/figures/NAME.svg as HTML. Inside the page, the drawing takes the colours of the page."""
    svg = (ROOT / "docs" / "figures" / f"{name}.svg").read_text(encoding="utf-8")
    return f'<figure class="diagram">{svg.strip()}</figure>\n'


def prepare(source: Path) -> None:
    """Write everything that Sphinx reads into `source`. Raises ValueError for a link that leads nowhere."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "docs", source)
    write(source / "commands.md", commands_page())
    site = Site()
    for path in source.glob("*.md"):
        path.write_text(site.linked(filled(path.read_text(encoding="utf-8"))), encoding="utf-8")
    for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"):
        notebook = site.notebook(json.loads(path.read_text(encoding="utf-8")))
        write(source / "notebooks" / path.name, json.dumps(notebook))
    site.source_pages(source / "source")
    extra = source / "extra"
    write(extra / "sample_trace.html", sample_trace(load_race(DEFAULT)[-1]))
    slides.build(map(read_lecture, lecture_paths()), extra / "lectures")


def sample_trace(run: EngineRun) -> str:
    """The page of a recorded run of the race."""
    limits = {
        "block_size": run.block_size,
        "num_blocks": run.num_blocks,
        "max_num_seqs": run.race.workload.max_num_seqs,
    }
    return page(Recording(run.events, title=f"{run.title} in the race, step by step", **limits))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.docs.build", description="Build the site.")
    parser.add_argument("--out", type=Path, default=BUILD, help="directory for source and html (default: build/docs)")
    out: Path = parser.parse_args(arguments).out
    prepare(out / "source")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-E", out / "source", out / "html"]
    quiet = [] if sys.stdout.isatty() else ["-q"]  # a person would wait for a minute without a word
    code = subprocess.run([*map(str, command), *quiet], cwd=ROOT).returncode
    if code == 0:
        scheduler_page.write(out / "html" / "lectures")
        print(out / "html" / "index.html")
    return code


if __name__ == "__main__":
    sys.exit(main())
