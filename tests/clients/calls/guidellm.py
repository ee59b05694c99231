"""GuideLLM, a load generator: one benchmark of three requests."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from calls.shared import CALLS, Server

LACKS = dict.fromkeys(CALLS.keys() - {"stream", "usage"}, "measures streams")


def stream(server: Server) -> None:
    folder = Path(tempfile.mkdtemp())
    command = [str(Path(sys.executable).parent / "guidellm"), "benchmark", "run"]
    command += ["--target", server.base_url.removesuffix("/v1"), "--model", server.model]
    command += ["--processor", server.tokenizer, "--profile", "synchronous", "--max-requests", "3"]
    command += ["--data", "prompt_tokens=16,output_tokens=8", "--outputs", "json", "--output-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    [report] = folder.glob("*.json")
    found = json.loads(report.read_text(encoding="utf-8"))["benchmarks"][0]["requests"]
    assert len(found["successful"]) == 3 and not found["errored"], found
    assert all(request["output_tokens"] == 8 for request in found["successful"])


usage = stream  # counts the tokens by the usage in the chunks
