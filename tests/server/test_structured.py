"""Structured outputs over HTTP: OpenAI's `response_format` and vLLM's `structured_outputs`."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from nanovllm.text.grammars import TokenMatcher
from tests.server.harness import STORY, Served
from tests.server.test_process import started

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tom", "Anna"]}},
    "required": ["name"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


def is_person(text: str) -> bool:
    return json.loads(text) in ({"name": "Tom"}, {"name": "Anna"})


def chat(client: openai.OpenAI, **more: Any) -> Any:
    values: dict[str, Any] = {"messages": [{"role": "user", "content": STORY}], "max_tokens": 100, "seed": 1} | more
    return client.chat.completions.create(model="story", **values)


def test_response_format_json_schema_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = chat(client, response_format=FORMAT, n=2)
    assert all(is_person(c.message.content) and c.finish_reason == "stop" for c in whole.choices)
    chunks = [c.choices[0] for c in chat(client, response_format=FORMAT, stream=True)]
    assert is_person("".join(c.delta.content or "" for c in chunks)) and chunks[-1].finish_reason == "stop"


def test_structured_outputs_of_completions(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"choice": ["Tom", "the dog"]}
    for structure, good in ((body, body["choice"].__contains__), ({"json": SCHEMA}, is_person)):
        answer = client.completions.create(
            model="story", prompt=[STORY, "Otto"], max_tokens=100, seed=2, extra_body={"structured_outputs": structure}
        )
        assert all(good(choice.text) for choice in answer.choices)


def test_json_object_and_text(client: openai.OpenAI) -> None:
    answer = chat(client, response_format={"type": "json_object"}, max_tokens=8)
    assert answer.choices[0].message.content.startswith("{")
    free = chat(client, max_tokens=8)
    assert chat(client, response_format={"type": "text"}, max_tokens=8).choices[0].message == free.choices[0].message


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "response_format.schema",
            '"json_schema": {"name"',
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, None, "leave one out"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one of json, regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "choice must not be empty"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "string"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "a valid dictionary, or a valid string"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
        (
            {"structured_outputs": {"json": {"x-guidance": {"lenient": True}, "not": {}}}},
            "structured_outputs.json",
            '"not"',
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
            "response_format",
            "response_format cannot be enforced",
        ),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "ignore_eos must be False"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "look-around"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "ignore_eos must be False"),
    ],
)
def test_what_cannot_be_done_is_a_400(served: Served, body: Any, param: str | None, message: str) -> None:
    answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": STORY} | body, timeout=30)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and message in error["message"]


def test_a_grammar_that_fails_is_a_500_that_says_so(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenMatcher, "accept", lambda self, token_id: "structured_outputs: too complex")
    body = {"prompt": STORY, "structured_outputs": {"regex": "a+"}}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "structured_outputs: too complex",
        "type": "server_error",
        "param": None,
        "code": "structured_outputs",
    }


def test_a_request_that_contradicts_itself_is_a_400(served: Served) -> None:
    body = {"prompt": STORY, "structured_outputs": {"regex": "a+"}, "allowed_token_ids": [17]}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 400 and "together with the request's other" in answer.json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="several API processes")
def test_grammars_are_compiled_in_the_process_of_the_engine() -> None:
    """And in the API process, which refuses. Several at once, beside plain requests."""
    serve = [sys.executable, "-m", "nanovllm.cli", "serve", "--port", "0", "--device", "cpu", "--api-servers", "2"]
    colours = ["red", "green", "blue"]
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}

    def ask(url: str, **fields: Any) -> httpx.Response:
        body = {"prompt": "Once", "max_tokens": 60, "temperature": 1.0} | fields
        return httpx.post(f"{url}/v1/completions", json=body, timeout=90)

    with started(serve) as process, ThreadPoolExecutor(8) as pool:
        url = process.url()
        chosen = [pool.submit(ask, url, structured_outputs={"choice": colours}, n=2) for _ in range(4)]
        plain = [pool.submit(ask, url, seed=1) for _ in range(2)]
        for asked in chosen:
            assert {choice["text"] for choice in asked.result().json()["choices"]} <= set(colours)
        assert plain[0].result().json()["choices"] == plain[1].result().json()["choices"]
        for _ in range(3):
            answer = ask(url, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})
            choice = answer.json()["choices"][0]
            assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["text"])["age"], int)
        refused = ask(url, structured_outputs={"json": {"not": {}}})
        assert refused.status_code == 400 and "not" in refused.json()["error"]["message"]
        assert process.end() == 0
