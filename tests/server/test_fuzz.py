"""The server's OpenAPI schema, and what schemathesis makes of it: requests that obey it and requests that do not."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanovllm.server.openai.tolerance import HARMLESS
from tests.server.harness import server

SECONDS = 40


def narrowed(schema: dict[str, Any]) -> dict[str, Any]:
    """Most of what obeys the real schema is refused still: no such model, no such token. Some is to be served."""
    token = {"type": "integer", "minimum": 0, "maximum": 300}
    for name in "CompletionRequest", "ChatRequest", "ResponsesRequest":
        properties = schema["components"]["schemas"][name]["properties"]
        properties["model"] = {"const": "story"}
        for field, values in HARMLESS.items():  # which the schema does not name
            properties.setdefault(field, {"enum": [None, *values]})
        properties["echo"] = {}  # anything
        properties["stop_token_ids"]["items"] = token
        properties["min_tokens"]["maximum"] = 1
        # Prompts are to be scored, too: with few tokens after them, or none.
        properties["max_tokens"] = {"enum": [None, 0, 1, 3]}
        properties["prompt_logprobs"] = {"enum": [None, 0, 2, 20, True]}
    schema["components"]["schemas"]["CompletionRequest"]["properties"]["echo"] = {"enum": [None, False, True, 1]}
    for form in schema["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]["anyOf"]:
        items = form.get("items", {})
        for holder in (form, items):
            if holder.get("items") == {"type": "integer"}:
                holder["items"] = token
    return schema


@pytest.mark.slow
@pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed: make setup")
def test_no_request_is_answered_with_a_500(tmp_path: Path) -> None:
    with server(max_model_len=48, num_kv_blocks=512, max_num_seqs=64) as served:
        options = f"--max-time {SECONDS} --seed 1 --phases coverage,fuzzing --checks not_a_server_error --no-shrink"
        schema = narrowed(httpx.get(f"{served.url}/openapi.json").json())
        (tmp_path / "openapi.json").write_text(json.dumps(schema))
        command = [sys.executable, "-m", "schemathesis.cli", "run", *options.split(), "--suppress-health-check", "all"]
        command += ["--url", served.url, "openapi.json"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS * 4)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        assert httpx.get(f"{served.url}/health").status_code == 200
        served.wait_idle()
        metrics = httpx.get(f"{served.url}/metrics").text
        counts = re.findall(
            r'^vllm:request_success_total\{.*finished_reason="(?:stop|length)".*\} (\d+)', metrics, flags=re.MULTILINE
        )
        assert sum(map(int, counts)) > 0, "no request was good enough to be served"  # of few, on a busy machine


def test_the_schema_says_what_is_accepted() -> None:
    with server() as served:
        schema = httpx.get(f"{served.url}/openapi.json").json()
        assert set(schema["paths"]) == {
            "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/v1/models/{name}", "/health",
            "/metrics", "/tokenize", "/detokenize", "/version", "/ping",
        }  # fmt: skip
        fields = schema["components"]["schemas"]["CompletionRequest"]
        assert fields["additionalProperties"] is True and fields["required"] == ["prompt"]
        assert {"n", "stop", "seed", "logprobs", "priority", "stream_options"} <= set(fields["properties"])
        for page in "/docs", "/redoc":  # which would load their scripts from elsewhere
            assert httpx.get(served.url + page).status_code == 404
