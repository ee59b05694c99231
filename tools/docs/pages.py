"""Pages of the site that are made from the code, the measured figures, the manifest and the Makefile."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

from stages.manifest import load_stages
from tools import ROOT
from tools.pictures.state_diagrams import START, Arrow, block_arrows, sequence_arrows

API = {
    "The package": "nanovllm:LLM nanovllm:AsyncLLM nanovllm:SamplingParams nanovllm:RequestOutput "
    "nanovllm:CompletionOutput nanovllm.outputs:RequestMetrics",
    "Configuration": "nanovllm.config:EngineConfig nanovllm.config:Speculation",
    "Events and recordings": "nanovllm.engine.trace:Trace nanovllm.trace_view:Recording nanovllm.trace_view:page",
    "The engine's joints": "nanovllm.engine.engine:LLMEngine nanovllm.engine.scheduler:Scheduler "
    "nanovllm.engine.block_manager:BlockManager nanovllm.engine.plan:Scheduled nanovllm.engine.plan:StepPlan "
    "nanovllm.engine.plan:StepResult nanovllm.attention.interface:AttentionMetadata "
    "nanovllm.attention.interface:AttentionBackend",
    "The stages": "stages.core:SamplingParams stages.core:Engine stages.core:sample stages.model:Transformer "
    "stages.checkpoint:load_model",
}


def signature(thing: Any) -> str:
    """The head of a function as the code has it. Of a class: its head, and that of its `__init__` or its fields."""
    lines = textwrap.dedent(inspect.getsource(thing)).splitlines()
    [node] = ast.parse("\n".join(lines)).body
    parts: list[Any] = [node]
    if isinstance(node, ast.ClassDef):
        made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        parts += made or [n for n in node.body if isinstance(n, ast.AnnAssign)]
    shown: list[str] = []
    for part in parts:  # of what has a body only the lines before it
        last = max(part.lineno, part.body[0].lineno - 1) if hasattr(part, "body") else part.end_lineno
        shown += lines[part.lineno - 1 : last]
    return "\n".join(shown)


def described(thing: Any) -> str:
    code = f"```python\n{signature(thing)}\n```\n"
    text = inspect.cleandoc(thing.__doc__ or "")
    return code + (f"\n``````text\n{text}\n``````\n" if text and not text.startswith(f"{thing.__name__}(") else "")


def api_page() -> str:
    """The page of the public classes and functions, with signatures and docstrings from the code."""
    parts = ["# API\n\nFrom the docstrings. Shapes are in brackets: `[T, H]` is T tokens of H numbers.\n"]
    for title, names in API.items():
        parts.append(f"## {title}\n")
        for module, _, name in (entry.partition(":") for entry in names.split()):
            thing: Any = getattr(import_module(module), name)
            file = Path(inspect.getsourcefile(thing) or "").relative_to(ROOT).as_posix()
            parts.append(f"### {name}\n\n`from {module} import {name}`, in `{file}`:\n\n{described(thing)}")
            methods = vars(thing).items() if inspect.isclass(thing) else ()
            for method, function in methods:
                called = function.__func__ if isinstance(function, classmethod | staticmethod) else function
                if inspect.isfunction(called) and method[0] != "_" and called.__doc__:
                    parts.append(f"#### {name}.{method}\n\n{described(called)}")
    parts.append("### The stages' engines\n\nCalled as `Engine` says, with the options that each has:\n")
    rows = []
    for s in load_stages():
        options = ", ".join(f"`{option}`" for option in s.options) or "–"
        rows.append(f"| {s.number} | [`{s.class_name}`](../stages/{s.module_name}.py) | {options} |")
    return "\n".join([*parts, "| stage | class | options |\n|---|---|---|", *rows, ""])


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


def states_tables() -> str:
    def table(title: str, arrows: set[Arrow]) -> str:
        rows = [f"| {a} | {b} | {label} |" for a, b, label in sorted(arrows) if START not in (a, b)]
        return "\n".join([f"### {title}", "", f"<!-- diagram: {title.split()[-1]} -->", "", "| from | to | by |",
                          "|---|---|---|", *rows, ""])  # fmt: skip

    return table("A sequence", sequence_arrows()) + "\n" + table("A KV block", block_arrows())
