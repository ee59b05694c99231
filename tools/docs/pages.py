"""Parts of the site that are made from the manifest, the Makefile and the sizes of the files."""

from __future__ import annotations

import re

from stages.manifest import load_stages
from tools import ROOT


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
