"""`tools/gpu_check.sh`, with a stand-in for Python that only writes down what it is asked to run."""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

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
    environment |= {"OUT": str(tmp_path / "out"), "ASKED": str(asked), "TESTS": "", "STAGES": "", "BENCHMARKS": ""}
    command = ["bash", "tools/gpu_check.sh", str(python)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in asked.read_text().splitlines()]


def values(command: list[str], option: str) -> list[str]:
    return [after for name, after in pairwise(command) if name == option]


def test_the_kernels_records_are_those_of_the_docs(tmp_path: Path) -> None:
    commands = asked_for(tmp_path, KERNELS="1", COMMIT="what I say")
    written = {Path(values(command, "--out")[0]).name: command for command in commands}
    assert len(written) == len(commands)
    shown = re.findall(r"<!-- generated: (\S+) -->", (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8"))
    assert shown and {f"{name}.json" for name in shown} <= set(written)
