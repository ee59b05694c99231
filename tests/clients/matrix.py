"""Run every call of the public clients against `nanovllm serve`, and write what came of it into docs/clients.md.

    python -m tests.clients.matrix                       all of them: make test-clients
    python -m tests.clients.matrix llm --call chat       one client, one call; the page stays as it is

The clients live in environments of their own, `.venv-clients/NAME`, one for each file `tests/clients/NAME.txt`: not all
of them go together. Each file pins every package. torch, which two of them need, is that of the project.
"""

import argparse
import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.clients.calls.shared import CALLS
from tests.server.test_process import started

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".venv-clients"
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- clients: written by make test-clients -->\n", "<!-- end generated -->"
SMOLLM2 = Path("~/.cache/nanovllm/SmolLM2-135M-Instruct").expanduser()
STORY = ROOT / "assets" / "story_model"
QUIET = {  # nobody is asked for anything, and nobody is told anything
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "OMP_NUM_THREADS": "1",
}


class Client(NamedTuple):
    calls: str  # the module in `calls`
    package: str  # as the lock file names it
    environment: str = "newer"


CLIENTS = [
    Client("openai", "openai"),
    Client("langchain_openai", "langchain-openai"),
    Client("litellm", "litellm"),
    Client("llama_index", "llama-index-llms-openai-like", "older"),
    Client("instructor", "instructor"),
    Client("pydantic_ai", "pydantic-ai-slim"),
    Client("llm", "llm"),
    Client("dspy", "dspy"),
    Client("haystack", "haystack-ai"),
    Client("smolagents", "smolagents"),
    Client("agents", "openai-agents"),
    Client("aider", "aider-chat", "older"),
    Client("lm_eval", "lm-eval"),
    Client("guidellm", "guidellm"),
]


# --- the environments ---


def python_of(environment: str) -> Path:
    """The Python of an environment, which is made first, if it is not there or its lock file has changed."""
    lock, folder = HERE / f"{environment}.txt", ENVIRONMENTS / environment
    python, done = folder / "bin" / "python", folder / "lock.txt"
    if not done.exists() or done.read_text("utf-8") != lock.read_text("utf-8"):
        print(f"{folder.relative_to(ROOT)}: installing {lock.name}, about a gigabyte", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), *"-m pip install --quiet --disable-pip-version-check --no-deps -r".split(), str(lock)]
        subprocess.run(pip, check=True)
        # Behind the environment's own packages, so that only what it lacks is found there: torch.
        [site] = folder.glob("lib/python*/site-packages")
        paths = [path for path in sys.path if path.endswith("site-packages")]
        (site / "zz_project.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
        done.write_text(lock.read_text("utf-8"), encoding="utf-8")
    return python


def version_of(client: Client) -> str:
    lines = (HERE / f"{client.environment}.txt").read_text("utf-8").splitlines()
    [version] = [line.partition("==")[2] for line in lines if line.startswith(f"{client.package}==")]
    return version


# --- the calls ---


@contextmanager
def serving(model: Path, *options: str) -> Iterator[str]:
    """The address of a server of this model, in processes of its own."""
    command = [sys.executable, "-m", "nanovllm.cli", "serve", str(model), "--port", "0", *options]
    with started(command, HF_HUB_OFFLINE="1") as process:
        yield process.url()


def run(client: Client, url: str, model: Path, calls: list[str]) -> dict[str, dict[str, Any]]:
    """What became of each call."""
    command = [str(python_of(client.environment)), str(HERE / "one.py"), client.calls]
    command += [f"{url}/v1", model.name, str(model), *calls]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | QUIET
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    told = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CALL ")]
    found = {one["call"]: one for one in told}
    for name in calls:
        found.setdefault(name, {"call": name, "ok": False, "error": done.stderr[-500:] or "no answer"})
    return found


# --- the page ---


def cell(one: dict[str, Any]) -> str:
    return "n/a" if "lacks" in one else "yes" if one["ok"] else "**no**"


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Markdown: a row for each client, a column for each call, and below what clients lack and why."""
    lines = [f"| client | version | {' | '.join(CALLS.values())} |", f"|---|---|{'---|' * len(CALLS)}"]
    reasons = []
    for client in CLIENTS:
        answers = found[client.calls]
        cells = " | ".join(cell(answers[name]) for name in CALLS)
        lines.append(f"| {client.package} | {version_of(client)} | {cells} |")
        lacks: dict[str, list[str]] = {}
        for name, title in CALLS.items():
            if "lacks" in answers[name]:
                lacks.setdefault(answers[name]["lacks"], []).append(title)
        reasons += [f"- {client.package}, {', '.join(titles)}: {reason}" for reason, titles in lacks.items()]
    return "\n".join([*lines, "", "Why a call is n/a:", "", *reasons, ""])


def write(text: str) -> None:
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", help="modules in tests/clients/calls; all of them by default")
    parser.add_argument("--call", action="append", choices=list(CALLS), help="only this one (may be repeated)")
    parser.add_argument("--url", help="of a server that runs already, with the model in --model")
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="the directory of the checkpoint")
    args = parser.parse_args()
    chosen = [client for client in CLIENTS if not args.clients or client.calls in args.clients]
    calls = args.call or list(CALLS)
    found: dict[str, dict[str, dict[str, Any]]] = {}

    def try_all(url: str, model: Path, calls: list[str]) -> bool:
        for client in chosen:
            found[client.calls] = run(client, url, model, calls)
            for one in found[client.calls].values():
                told = f"{model.name:22} {client.package:28} {one['call']:15} {cell(one)}"
                print(told, one.get("error", ""), flush=True)
        return not any(cell(one) == "**no**" for answers in found.values() for one in answers.values())

    good = True
    if args.url:
        good = try_all(args.url, args.model, calls)
    else:
        if some := [name for name in calls if name in ("chat", "stream", "echo")]:
            with serving(STORY) as url:
                good = try_all(url, STORY, some)
        with serving(args.model, "--max-model-len", "2048", "--tool-parser", "hermes") as url:
            good = try_all(url, args.model, calls) and good
    if not args.clients and not args.call:
        write(table(found))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
