"""`tools/gpu_check.sh`, with a stand-in for Python that only writes down what it is asked to run."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engine.__main__ import parse

ROOT = Path(__file__).parents[1]
STAND_IN = f"""#!{sys.executable}
import json, os, sys
if sys.argv[1] == "-c":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
if sys.argv[1] == "-":
    open(sys.argv[2], "w").write('{{"card": "NVIDIA H200"}}')
else:
    open(os.environ["ASKED"], "a").write(json.dumps(sys.argv[1:]) + "\\n")
"""


def asked_for(tmp_path: Path, **environment: str) -> list[list[str]]:
    python, asked = tmp_path / "python", tmp_path / "asked"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    nothing = {"TESTS": "", "STAGES": "", "BENCHMARKS": ""}
    environment = nothing | environment | {"OUT": str(tmp_path / "out"), "ASKED": str(asked)}
    command = ["bash", "tools/gpu_check.sh", str(python)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in asked.read_text().splitlines()]


def test_the_kernels_records_are_those_of_the_docs(tmp_path: Path) -> None:
    commands = asked_for(tmp_path, KERNELS="1", COMMIT="what I say")
    assert all(command[0] == "-m" and command[2:] == ["--out", str(tmp_path / "out")] for command in commands)
    written = {importlib.import_module(command[1]).RECORD for command in commands}
    assert len(written) == len(commands)
    shown = re.findall(r"<!-- generated: ([^.]+)\S* -->", (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8"))
    assert shown and set(shown) <= written


def test_the_engines_benchmarks_have_their_options(tmp_path: Path) -> None:
    commands = asked_for(tmp_path, BENCHMARKS="tensor_parallel ablations idle", RANKS="4", VLLM="v", FLASH="f")
    assert [command[:2] for command in commands] == [["-m", "benchmarks.engine"]] * 3
    options = [vars(parse(["--quick", *command[2:]])) for command in commands]
    told = [[chosen[key] for key in ("names", "ranks", "vllm_path", "flash_path")] for chosen in options]
    assert told == [[["tensor_parallel"], 4, "v", None], [["ablations"], 2, None, "f"], [["idle"], 2, None, None]]


COLLECT = """
import sys, pytest
class Plugin:
    def pytest_collection_modifyitems(self, items):
        marks = ((item.nodeid, item.get_closest_marker("gpu")) for item in items)
        print(*(f"several: {name}" for name, mark in marks if mark is not None and mark.args), sep="\\n")
sys.exit(pytest.main(["--collect-only", "-q", *sys.argv[1:]], plugins=[Plugin()]))
"""


@pytest.mark.slow
def test_what_needs_several_gpus_is_run_where_all_are_visible() -> None:
    """Processes that share the cards see one each, and skip such a test: it is in one of the files that run by
    themselves, or is selected by its name."""
    script = (ROOT / "tools" / "gpu_check.sh").read_text(encoding="utf-8")
    [listed] = re.findall(r'^ranks="([^"]+)"', script, re.MULTILINE)
    [selected] = re.findall(r"gpu_test other_ranks -k (\w+)", script)
    command = [sys.executable, "-c", COLLECT, "tests/engine", "tests/stages", "tests/kernels"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    found = re.findall(r"^several: (.+)", done.stdout, re.MULTILINE)
    assert len(found) > 50, done.stdout[-500:]
    assert not [name for name in found if name.partition("::")[0] not in listed.split() and selected not in name]
