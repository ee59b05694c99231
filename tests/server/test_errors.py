"""What a mistake gets: the right status, OpenAI's shape, the field by name, and nothing of what was sent in any log."""

import asyncio
import json
import logging
from typing import Any

import httpx
import openai
import pytest

from nanovllm.llm import EMBEDDED_MODEL
from tests.server.harness import STORY, Served, server
from tests.server.shadow import Gate

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def ask(served: Served, path: str, body: Any, **more: Any) -> httpx.Response:
    with httpx.Client(base_url=served.url, timeout=30) as http:
        return http.post(path, **({"json": body} | more))


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "prompt", "required"),
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": []}, "prompt", ""),
        ({"prompt": 5}, "prompt", "prompt: Input should be a valid string, or a valid list"),
        ({"prompt": ["a", [1]]}, "prompt.0", "neither"),
        ({"prompt": [[]]}, "prompt.0", "must not be empty"),
        ({"prompt": [1.5]}, "prompt.0", ""),
        ({"prompt": [10**6]}, "prompt", "outside the vocabulary"),
        ({"prompt": [-1]}, "prompt", "outside the vocabulary"),
        ({"prompt": [10**30]}, "prompt", "outside the vocabulary"),
        ({"prompt": [True]}, "prompt.0", ""),
        ({"prompt": [1] * 300}, "prompt", "max_model_len=256"),
        ({"prompt": "a", "n": 0}, "n", "1"),
        ({"prompt": "a", "n": 10**9}, "n", "128"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "0"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "integer"),
        ({"prompt": "a", "max_tokens": 10**30}, "max_tokens", ""),
        ({"prompt": "a", "temperature": -1}, "temperature", "0"),
        ({"prompt": "a", "temperature": 1e300}, "temperature", "2"),
        ({"prompt": "a", "top_p": 0}, "top_p", "0"),
        ({"prompt": "a", "top_k": -2}, "top_k", "-1"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens", "max_tokens"),
        ({"prompt": "a", "seed": 2**63}, "seed", ""),
        ({"prompt": "a", "stop": 0}, "stop", "stop: Input should be a valid string, or a valid list"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop", "a length of 17; at most 16"),
        ({"prompt": "a", "stream_options": "x"}, "stream_options", "must be an object"),
        ({"prompt": "a", "max_completion_tokens": 9}, "max_completion_tokens", "in /v1/completions is max_tokens"),
        ({"prompt": "a", "stop_token_ids": [10**6]}, "stop_token_ids", "vocabulary"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "20"),
        ({"prompt": "a", "priority": 2**40}, "priority", ""),
        ({"prompt": "a", "stream": "yes"}, "stream", "boolean"),
        (
            {"prompt": "a", "stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "include_usage?",
        ),
        ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias", "token ids"),
        ({"prompt": "a", "logit_bias": {"5": "1"}}, "logit_bias.5", "number"),
        ({"prompt": "a", "logit_bias": [5]}, "logit_bias", "dictionary"),
        ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias", ""),
        ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1024"),
        ({"prompt": "a", "logit_bias": {str(10**6): 1}}, "logit_bias", "logit_bias contains 1000000"),
        ({"prompt": "a", "bad_words": "word"}, "bad_words", "list"),
        ({"prompt": "a", "bad_words": [""]}, "bad_words.0", "1"),
        ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", "1"),
        ({"prompt": "a", "allowed_token_ids": [-1]}, "allowed_token_ids", "allowed_token_ids"),
        ({"prompt": "a", "best_of": 2}, "best_of", "not supported"),
        ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1, or greater than or equal to 1"),
        ({"prompt": "a", "stop_sequences": ["."]}, "stop_sequences", "its name here is stop"),
        ({"prompt": "a", "extra_body": {"top_k": 1}}, "extra_body", "beside the other fields"),
        ([], None, "JSON object"),
    ],
)
def test_a_bad_completion_is_a_400_that_names_the_field(
    served: Served, body: Any, param: str | None, message: str
) -> None:
    error = error_of(ask(served, COMPLETIONS, body), 400)
    assert error["type"] == "invalid_request_error" and error["param"] == param and message in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "messages", "required"),
        ({"messages": []}, "messages", "1"),
        ({"messages": "hello"}, "messages", "list"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "user"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content",
            "Input should be a valid string, or a valid list",
        ),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0", "must be an object"),
        ({"messages": [{"role": "user", "content": "x", "images": ["y"]}]}, "messages.0.images", "reads no images"),
        (
            {"messages": [{"role": "assistant", "content": "x", "prefix": True}]},
            "messages.0.prefix",
            "continue_final_message",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "system": "y"}, "system", "a message with the role system"),
        (
            {"messages": [{"role": "user", "content": "x"}], "enable_thinking": False},
            "enable_thinking",
            "chat_template_kwargs",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            "messages.0.content.1.type",
            "reads no images",
        ),
        ({"messages": [None]}, "messages.0", "must be an object"),
        ({"messages": None}, "messages", "Field required"),
        ({"messages": [{"role": "user", "content": "x"}], "functions": [{"name": "f"}]}, "functions", "as tools"),
        (
            {"messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": "function"}, "tools": []},
            "tool_choice.function",
            "Field required",
        ),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages", "no system messages"),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools.0.type", "Field required"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages.0.tool_calls.0.function",
            "Field required",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tokenize": 1}},
            "chat_template_kwargs",
            "'tokenize'",
        ),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, None, "max_model_len=256"),
    ],
)
def test_a_bad_chat_is_a_400_that_names_the_field(served: Served, body: Any, param: str | None, message: str) -> None:
    error = error_of(ask(served, CHAT, body), 400)
    assert error["type"] == "invalid_request_error" and message in error["message"]
    assert (error["param"] or "").startswith(param or "")


def test_a_part_that_is_no_media_is_not_called_so(served: Served) -> None:
    part = {"type": "input_text", "text": "x"}
    error = error_of(ask(served, CHAT, {"messages": [{"role": "user", "content": [part]}]}), 400)
    assert error["message"] == "messages.0.content.0.type: Input should be 'text'"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ""),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", ""),
        (b"\x1f\x8b", "cannot be read as JSON"),
        (b"[" * 10_000, ""),
        (b'{"prompt": 1e999}', ""),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "temperature": Infinity}', "temperature"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", ""),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "stop": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "cache_salt": "\\udfff"}', "surrogate"),
    ],
)
def test_a_body_that_is_no_request_is_a_400(served: Served, content: bytes, message: str) -> None:
    headers = {"content-type": "application/json"}
    assert message in error_of(ask(served, COMPLETIONS, None, content=content, headers=headers), 400)["message"]


def test_null_is_as_good_as_absent(served: Served) -> None:
    body = {"prompt": "a", "stop": None, "logit_bias": None, "seed": None, "stream_options": None, "max_tokens": 1}
    assert ask(served, COMPLETIONS, body).status_code == 200


def test_a_form_sent_by_some_web_page_is_refused(served: Served) -> None:
    """A page can send those to localhost without being asked for permission."""
    headers = {"content-type": "text/plain"}
    error_of(ask(served, COMPLETIONS, None, content=b'{"prompt": "a"}', headers=headers), 400)


def test_unknown_paths_methods_and_models(served: Served) -> None:
    error_of(ask(served, "/v1/nothing", {}), 404)
    error_of(httpx.get(served.url + COMPLETIONS), 405)
    for body in {"prompt": "a", "model": "gpt"}, {"prompt": "a", "model": "\ud800"}:
        content = json.dumps(body).encode()
        response = ask(served, COMPLETIONS, None, content=content, headers={"content-type": "application/json"})
        error = error_of(response, 404)
        assert error["code"] == "model_not_found" and "'story'" in error["message"]


def test_a_refused_prompt_of_several_leaves_nothing_behind(served: Served) -> None:
    """Not even of those that were fine, which were queued before it."""
    error_of(ask(served, COMPLETIONS, {"prompt": [[1, 2], [10**6]], "max_tokens": 200}), 400)
    served.wait_idle()


# --- limits ----------------------------------------------------------------------------------------------------------


def test_a_model_without_a_template_says_so_and_not_where_it_lies() -> None:
    with server(EMBEDDED_MODEL.parent / "story_draft") as served:
        error = error_of(ask(served, CHAT, {"messages": [{"role": "user", "content": "x"}]}), 400)
        assert "chat template" in error["message"] and "/assets" not in error["message"]


def test_a_key_is_asked_for_before_anything_is_read() -> None:
    with server(app_options={"api_keys": ["sesame"], "max_body_bytes": 1000}) as served:
        for value in "", "Bearer", "Bearer wrong", "Bearer sesame2", "Bearer sesam", "sesame", "Basic sesame":
            headers = {"authorization": value}
            error = error_of(ask(served, COMPLETIONS, {"prompt": "x" * 2000}, headers=headers), 401)
            assert error["code"] == "invalid_api_key" and "sesame" not in error["message"]
        error_of(httpx.get(served.url + "/v1/models"), 401)
        assert httpx.get(served.url + "/v1/models", headers={"authorization": "bearer sesame"}).status_code == 200
        with served.client("wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with served.client("sesame") as client:
            assert client.completions.create(model="story", prompt=STORY, max_tokens=1, temperature=0).choices[0].text
        assert httpx.get(served.url + "/health").status_code == 200


def test_a_body_too_large_is_a_413_whether_it_says_so_or_not() -> None:
    with server(app_options={"max_body_bytes": 1000}) as served:
        content = json.dumps({"prompt": "x" * 1000}).encode()
        headers = {"content-type": "application/json"}
        announced = ask(served, COMPLETIONS, None, content=content, headers=headers)
        chunked = ask(served, COMPLETIONS, None, content=iter([content[:500], content[500:]]), headers=headers)
        for response in announced, chunked:
            assert error_of(response, 413)["code"] == "body_too_large"
        assert ask(served, COMPLETIONS, {"prompt": "x" * 100, "max_tokens": 1}).status_code == 200


def test_a_full_queue_is_a_429_and_the_others_are_served() -> None:
    async def main(served: Served) -> None:
        gate = Gate(served.llm)
        async with httpx.AsyncClient(base_url=served.url, timeout=30) as http:

            async def post() -> httpx.Response:
                return await http.post(COMPLETIONS, json={"prompt": [1, 2], "max_tokens": 4})

            held = [asyncio.create_task(post()) for _ in range(2)]
            while len(served.llm._requests) < 2:
                await asyncio.sleep(0.005)
            refused = await post()
            assert error_of(refused, 429)["type"] == "rate_limit_error" and refused.headers["retry-after"] == "1"
            gate.open()
            assert [(await answer).status_code for answer in held] == [200, 200]
            assert (await post()).status_code == 200

    with server(max_num_seqs=1, max_queue=1) as served:
        asyncio.run(main(served))
        with served.client() as client:
            assert client.completions.create(model="story", prompt=STORY, max_tokens=1).choices


# --- faults ----------------------------------------------------------------------------------------------------------


def test_when_the_loop_dies_waiters_and_newcomers_get_a_503_and_so_does_health() -> None:
    def broken() -> None:
        raise RuntimeError("out of luck")

    async def main(served: Served) -> None:
        gate = Gate(served.llm)
        async with httpx.AsyncClient(base_url=served.url, timeout=30) as http:
            body = {"prompt": [1, 2], "max_tokens": 50}
            whole = asyncio.create_task(http.post(COMPLETIONS, json=body))
            streamed = asyncio.create_task(http.post(COMPLETIONS, json=body | {"stream": True}))
            while len(served.llm._requests) < 2:
                await asyncio.sleep(0.005)
            await gate.let(3)
            assert (await http.get("/health")).status_code == 200
            served.llm.llm.engine.scheduler.schedule = broken
            gate.open()
            error = error_of(await whole, 503)
            assert error["code"] == "engine_stopped" and "luck" not in error["message"]
            lines = (await streamed).text.split("\n\n")
            assert json.loads(lines[-3].removeprefix("data: "))["error"]["code"] == "engine_stopped"
            error_of(await http.get("/health"), 503)
            error_of(await http.post(COMPLETIONS, json=body), 503)
            assert 'nanovllm:engine_alive{engine="0",model_name="story"} 0.0' in (await http.get("/metrics")).text

    with server() as served:
        asyncio.run(main(served))
        with served.client() as client, pytest.raises(openai.InternalServerError):
            client.completions.create(model="story", prompt=STORY)


def test_a_bad_row_is_a_500_for_its_own_client_alone() -> None:
    def spoiled(plan: Any) -> Any:
        handle = submit(plan)
        result = handle.result()

        class Handle:
            def result(self) -> Any:
                for key in result.tokens:
                    if engine.scheduler.sequences[key].num_prompt_tokens == 3:
                        result.tokens[key] = [-1], None
                return result

        return Handle()

    with server() as served:
        engine = served.llm.llm.engine
        submit = engine.executor.submit
        setattr(engine.executor, "submit", spoiled)  # noqa: B010
        body = {"max_tokens": 3}
        error = error_of(ask(served, COMPLETIONS, body | {"prompt": [1, 2, 3]}), 500)
        assert error["type"] == "server_error" and error["code"] == "bad_logits"
        with served.client() as client, pytest.raises(openai.APIError, match="not finite"):
            list(client.completions.create(model="story", prompt=[1, 2, 3], stream=True))
        assert ask(served, COMPLETIONS, body | {"prompt": [1, 2]}).status_code == 200
        assert httpx.get(served.url + "/health").status_code == 200


def test_neither_prompts_nor_outputs_are_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    canary = "xylophone canary"
    with caplog.at_level(logging.DEBUG):
        for body in {"prompt": canary}, {"prompt": canary, "stop": 5}, {"prompt": canary * 500}, {"prompts": canary}:
            ask(served, COMPLETIONS, body)
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert not any(canary in message for message in ours)
