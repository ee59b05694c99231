"""Simon Willison's `llm`, told of the server by an extra-openai-models.yaml."""

import os
import tempfile
from pathlib import Path
from typing import Any

from calls.shared import ENOUGH, FEW, PROMPT, SCHEMA, Server, check_person, check_stream, check_text

LACKS = {
    "n": "asks for one answer at a time",
    "tools_required": "leaves the choice to the model",
    "tools_named": "leaves the choice to the model",
    "tools_streamed": "leaves the choice to the model",
    "echo": "has no such option",
    "usage": "asks for usage at the end only",
}
ENTRY = """
- model_id: here
  model_name: {model}
  api_base: {base_url}
  supports_schema: true
  supports_tools: true
- model_id: texts
  model_name: {model}
  api_base: {base_url}
  completion: true
"""


def model(server: Server, name: str = "here") -> Any:
    home = Path(tempfile.mkdtemp())
    (home / "extra-openai-models.yaml").write_text(ENTRY.format(**server._asdict()), encoding="utf-8")
    os.environ["LLM_USER_PATH"] = str(home)
    import llm

    found = llm.get_model(name)
    found.key = server.api_key
    return found


def chat(server: Server) -> None:
    check_text(model(server).prompt(PROMPT, stream=False, max_tokens=FEW).text())


def stream(server: Server) -> None:
    check_stream(list(model(server).prompt(PROMPT, max_tokens=FEW)))


def logprobs(server: Server) -> None:
    answer = model(server, "texts").prompt(PROMPT, max_tokens=FEW, logprobs=2)
    check_text(answer.text())
    assert answer.response_json["logprobs"]


def json_object(server: Server) -> None:
    assert model(server).prompt(PROMPT, stream=False, max_tokens=FEW, json_object=True).text().startswith("{")


def json_schema(server: Server) -> None:
    check_person(model(server).prompt(PROMPT, stream=False, max_tokens=ENOUGH, schema=SCHEMA).text())


def tools_auto(server: Server) -> None:
    def greet(name: str) -> str:
        """Greet a person by name."""
        return f"Hello {name}"

    answer = model(server).prompt(PROMPT, stream=False, max_tokens=FEW, tools=[greet])
    assert answer.text() or answer.tool_calls()
