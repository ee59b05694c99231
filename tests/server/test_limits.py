"""What one client may cost the others: bodies made to keep the server busy, and requests of very many sequences."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nanovllm import AsyncLLM
from nanovllm.admission import QueueFull
from nanovllm.server import options
from nanovllm.server.json_size import num_values
from nanovllm.server.openai.chat import ChatRequest
from nanovllm.server.openai.protocol import CompletionRequest
from tests.server.harness import Served, greedy, idle, serving, tokens
from tests.server.scripted import Scripted
from tests.server.shadow import Gate
from tests.server.test_errors import CHAT, COMPLETIONS, ask, error_of

MANY = 20_000
RESPONSES = "/v1/responses"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [1.5] * MANY}),
        (CompletionRequest, {"prompt": ["", 1] * MANY}),
        (CompletionRequest, {"prompt": [[]] * MANY}),
        (CompletionRequest, {"prompt": [["a"] * MANY]}),
        (CompletionRequest, {"prompt": "a", "stop": [5] * MANY}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * MANY}),
        (CompletionRequest, {"prompt": "a"} | {f"field {i}": 1 for i in range(MANY)}),
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, {"messages": [{}] * 2000}),
        (ChatRequest, {"messages": [{"role": "user", "content": "a"}] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * MANY}]}),
    ],
)
def test_a_body_full_of_mistakes_is_not_read_to_its_end(kind: type[ChatRequest], body: dict[str, Any]) -> None:
    """Each mistake would have an object of its own: four MiB of them took half a minute and gigabytes."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 10


texts = st.text(alphabet=[*'"\\\\{}[],:/uü🦊', "\ud800"])
values = st.recursive(texts | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(texts, inner))


@given(values, st.booleans())
@settings(max_examples=25)
def test_values_of_json_are_counted_without_reading_it(value: Any, ascii: bool) -> None:
    def count(one: Any) -> int:
        inner = [*one, *one.values()] if isinstance(one, dict) else one if isinstance(one, list) else []
        return isinstance(one, str | list | dict) + sum(map(count, inner))

    def commas(one: Any) -> int:
        inner = list(one.values()) if isinstance(one, dict) else one if isinstance(one, list) else []
        return max(0, len(inner) - 1) + sum(map(commas, inner))

    assert num_values(json.dumps(value, ensure_ascii=ascii)) == (count(value), commas(value))


TEXT, CALL = {"type": "text", "text": ""}, {"function": {"name": "f", "arguments": "{}"}}
DENSE = json.dumps(dict.fromkeys(map(str, range(MANY)), ""))


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [TEXT] * 1500}] * 2}, 400, "messages", "3000 text parts"),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 2100}, 400, "messages", "2048"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL] * 2100}]}, 400, "messages", "2048"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DENSE}}]}]},
         400, "messages.0.tool_calls.0.function.arguments", "at most 32768"),
        (RESPONSES, {"input": [{"role": "user", "content": [TEXT] * 2100}]}, 400, "input", "2100 text parts"),
        (RESPONSES, {"input": [{"role": "user", "content": ""}] * 2100}, 400, "input", "2048"),
        (CHAT, {"messages": [{"role": "user", "content": [TEXT] * MANY}]}, 413, None, "at most 32768"),
        (COMPLETIONS, {"prompt": [5] * 600_000}, 413, None, "at most 524288"),
        (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [5] * 300_000}, 400, "allowed_token_ids", "262144"),
    ],
)  # fmt: skip
def test_more_than_can_be_read_in_time_is_refused_by_name(
    served: Served, path: str, body: Any, status: int, param: str | None, message: str
) -> None:
    error = error_of(ask(served, path, body), status)
    assert error["param"] == param and message in error["message"], error


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(served: Served) -> None:
    longest = max(map(len, served.llm.llm.tokenizer.fast.get_vocab()))
    text = "x" * (256 * longest + 1)
    with patch("nanovllm.text.tokenizer.Tokenizer.encode", side_effect=AssertionError):
        error = error_of(ask(served, COMPLETIONS, {"prompt": ["a", text]}), 400)
        assert error["param"] == "prompt" and "max_model_len=256" in error["message"]
    messages = [{"role": "user", "content": half} for half in (text[::2], text[1::2])]
    with patch("nanovllm.text.tokenizer.Tokenizer.encode_chat", side_effect=AssertionError):
        error = error_of(ask(served, CHAT, {"messages": messages}), 400)
        assert error["param"] == "messages" and "max_model_len=256" in error["message"]


def test_an_error_repeats_only_the_beginning_of_what_it_is_about(served: Served) -> None:
    assert len(error_of(ask(served, COMPLETIONS, {"prompt": "a", "model": "m" * 10_000}), 404)["message"]) < 200


def test_a_short_prompt_waits_for_no_thread_and_a_long_one_makes_nobody_wait(scripted: Scripted) -> None:
    """Starting a thread takes longer than checking a short prompt. Here all threads are busy with something else."""
    short: list[dict[str, Any]] = [{"prompt": [5] * 2000}, {"prompt": "x" * 200}]
    long: list[dict[str, Any]] = [{"prompt": [5] * 3000}, {"prompt": "x" * 1000}]
    grammar = {"prompt": [5], "structured_outputs": {"regex": "a"}}

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(pool := ThreadPoolExecutor(1))
        pool.submit((free := threading.Event()).wait, 20)
        transport = httpx.ASGITransport(scripted.http.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:

            async def ask(body: dict[str, Any]) -> int:
                return (await http.post(COMPLETIONS, json=body)).status_code

            waiting = [asyncio.create_task(ask(body)) for body in [*long, grammar]]
            for body in short:
                assert await asyncio.wait_for(ask(body), 10) == 200
            assert not any(task.done() for task in waiting)
            free.set()
            assert await asyncio.gather(*waiting) == [200] * 3

    asyncio.run(main())


# --- the queue counts sequences --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 40], ids=["added at once", "held until the prompt is computed"])
def test_every_choice_counts_in_the_queue(length: int) -> None:
    async def main() -> None:
        async with serving(max_queue=4, max_num_seqs=2) as llm:
            gate = Gate(llm)
            large = llm.generate([1] * length, greedy(n=6))  # two will find a seat, four wait
            assert llm.num_waiting == 6
            await refused(llm)
            await gate.let(1)
            assert llm.num_waiting == 4 + (length > 16)  # only the first of them has its seat while others are held
            await refused(llm)
            await gate.let(1)
            assert llm.num_waiting == 4
            await large.aclose()
            await gate.let(1)
            assert llm.num_waiting == 0
            gate.open()
            assert len(await tokens(llm.generate([1, 2], greedy()))) == 8

    asyncio.run(main())


async def refused(llm: AsyncLLM) -> None:
    with pytest.raises(QueueFull, match="max_queue=4"):
        llm.generate([7, 1], greedy())


def test_requests_given_up_before_they_are_looked_at_do_not_fill_the_queue() -> None:
    """Neither those that lie in the inbox nor their aborts, nor the choices that were held for the first one."""

    async def main() -> None:
        async with serving(max_queue=4, max_num_seqs=2) as llm:
            gate = Gate(llm)
            first = asyncio.create_task(tokens(llm.generate([1, 2], greedy())))
            await gate.let(1)
            for _ in range(20):
                await llm.generate([1] * 40, greedy(n=4)).aclose()
                await gate.let(1)
            assert llm.num_waiting == 0
            for _ in range(20):
                llm.abort("nobody")
            gate.open()
            assert len(await first) == 8
            await idle(llm)
            assert llm.num_waiting == 0

    asyncio.run(main())


# --- names of hosts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("localhost.example.org", False),
        ("::", False),
        ("0.0.0.0", False),
        ("0", False),
        ("", False),
        ("127.0.0.1.example.org", False),
        ("192.168.1.1", False),
    ],
)
def test_what_is_this_machine_alone(host: str, alone: bool) -> None:
    assert options.is_loopback(host) == alone


def test_bodies_in_other_encodings_of_unicode_are_json_too(served: Served) -> None:
    headers = {"content-type": "application/json"}
    for encoding in "utf-16", "utf-32":
        content = json.dumps({"prompt": "a", "max_tokens": 1}).encode(encoding)
        assert httpx.post(served.url + COMPLETIONS, content=content, headers=headers, timeout=30).status_code == 200
