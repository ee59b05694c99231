"""GuideLLM, a load generator: one benchmark of three requests."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from calls.shared import CALLS, Server

LACKS = dict.fromkeys(CALLS.keys() - {"stream", "usage"}, "measures streams only")


def stream(server: Server) -> None:
    report = Path(tempfile.mkdtemp()) / "report.json"
    place = f"target={server.base_url.removesuffix('/v1')},model={server.model},api_key={server.api_key}"
    options = {
        "backend": f"kind=openai_http,{place}",
        "tokenizer": f"kind=huggingface_auto,model={server.tokenizer}",
        "profile": "kind=synchronous",
        "constraint": "kind=max_requests,count=3",
        "data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "output": f"kind=json,path={report}",
    }
    command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    found = json.loads(report.read_text(encoding="utf-8"))["benchmarks"][0]["requests"]
    assert found["successful"] and not found["errored"], found["errored"]
    assert {request["output_tokens"] for request in found["successful"]} == {8}


usage = stream  # counts the tokens by the usage in the chunks
