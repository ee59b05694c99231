"""Who may ask, and what is told to whom: CASES V1 to V4, V7, V8, V10, and the keys."""

import asyncio
import logging
import re
from typing import Any
from unittest.mock import AsyncMock, patch

import httpx
import openai
import pytest

from nanovllm.admission import NeverFits, QueueFull
from nanovllm.engine.engine import LLMEngine
from nanovllm.server.middleware import BREAK, BREAK_AFTER, Guard, is_allowed_host
from nanovllm.server.options import AppOptions
from tests.server.harness import Served, greedy, read, server, serving
from tests.server.shadow import Gate
from tests.server.test_errors import CHAT, COMPLETIONS, ask, error_of

PROMPT = {"prompt": [1, 2], "max_tokens": 2}


# --- V1, V2: the queue -----------------------------------------------------------------------------------------------


def test_v1_what_does_not_fit_into_the_queue_takes_no_place_in_it() -> None:
    """The neighbour that asks in the same moment is served."""

    async def main(served: Served) -> None:
        gate = Gate(served.llm)
        async with httpx.AsyncClient(base_url=served.url, timeout=30) as http:

            async def post(num_prompts: int, n: int = 1) -> httpx.Response:
                return await http.post(COMPLETIONS, json=PROMPT | {"prompt": [[1, 2]] * num_prompts, "n": n})

            for num_prompts, n in (9, 1), (3, 3), (256, 1), (1, 128):
                error = error_of(await post(num_prompts, n), 400)
                assert error["code"] == "too_many_sequences" and "max_queue=6" in error["message"]
            assert served.llm.num_waiting == 0
            neighbour = asyncio.create_task(post(3))
            while len(served.llm._requests) < 3:
                await asyncio.sleep(0.005)
            assert error_of(await post(3, 2), 429)["code"] == "queue_full"  # six more do not fit now
            assert served.llm.num_waiting == 3 and len(served.llm._requests) == 3
            other = asyncio.create_task(post(5))  # but five do
            while len(served.llm._requests) < 8:
                await asyncio.sleep(0.005)
            gate.open()
            assert (await neighbour).status_code == (await other).status_code == (await post(4, 2)).status_code == 200

    with server(shadow=True, max_queue=6, max_num_seqs=2) as served:
        asyncio.run(main(served))


def test_v1_requests_that_are_submitted_together_are_queued_together_or_not_at_all() -> None:
    async def main() -> None:
        async with serving(max_queue=2, max_num_seqs=2) as llm:
            checked = [llm.check({"prompt_token_ids": [i, 1]}, greedy()) for i in range(5)]
            with pytest.raises(NeverFits, match="5 sequences"):
                llm.submit(checked)
            with pytest.raises(ValueError, match="must differ"):
                llm.submit(checked[:2], ["a", "a"])
            assert llm.num_waiting == 0 and not llm._requests
            gate = Gate(llm)
            streams = llm.submit(checked[:3])
            with pytest.raises(QueueFull):
                llm.submit(checked[:2])
            assert llm.num_waiting == 3
            gate.open()
            assert [len((await read(stream))[0].token_ids) for stream in streams] == [8, 8, 8]

    asyncio.run(main())


def test_v2_what_waits_is_one_number_which_nobody_sees_in_the_making() -> None:
    """The engine's queues change while others ask. What they see is what the last step left."""

    async def main() -> None:
        async with serving(max_num_seqs=2) as llm:
            seen: list[int] = []
            start = LLMEngine._start

            def watched(engine: LLMEngine, seq: Any) -> None:
                start(engine, seq)
                seen.append(llm.num_waiting)  # as any thread could in this moment

            with patch.object(LLMEngine, "_start", watched):
                gate = Gate(llm)
                stream = llm.generate([1] * 40, greedy(n=6))
                await gate.let(1)  # the first choice is added, has its prompt computed, and the others start
                assert seen[1:] == [6] * 5 and llm.num_waiting == 5
                gate.open()
                await read(stream)

    asyncio.run(main())


@pytest.mark.parametrize("error", [ValueError("__len__() should return >= 0"), TypeError("oops")])
def test_v2_an_internal_error_is_no_mistake_of_the_client(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with server(shadow=True) as served:
        with patch.object(type(served.llm), "_check_queue", side_effect=error):
            response = ask(served, COMPLETIONS, PROMPT)
        told = error_of(response, 500)
        assert told["type"] == "server_error" and str(error) not in told["message"]
        [record] = [record for record in caplog.records if record.exc_info]
        assert response.headers["x-request-id"] in record.getMessage()
        assert record.exc_info and record.exc_info[1] is error
        assert ask(served, COMPLETIONS, PROMPT).status_code == 200
        with patch("nanovllm.server.metrics.engine_state", side_effect=error):
            error_of(httpx.get(served.url + "/metrics"), 500)
        found = httpx.get(served.url + "/metrics").text
        assert 'handler="/v1/completions",method="POST",model_name="story",status="500"} 1.0' in found


# --- V3, V4, V8: what clients may say and are told -------------------------------------------------------------------


def test_v3_priority_is_the_operators_to_give(served: Served) -> None:
    with server(shadow=True) as strict:
        error = error_of(ask(strict, COMPLETIONS, PROMPT | {"priority": -1}), 400)
        assert error["param"] == "priority" and "--allow-priority" in error["message"]
        assert ask(strict, COMPLETIONS, PROMPT | {"priority": 0}).status_code == 200
    assert ask(served, COMPLETIONS, PROMPT | {"priority": -1}).status_code == 200  # which allows it


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_v4_nobody_learns_what_others_asked(stream: bool) -> None:
    body = {"prompt": [7] * 100, "max_tokens": 1, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}

    def cached(served: Served, key: str, **more: Any) -> int | None:
        answer = ask(served, COMPLETIONS, body | more, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
        found = re.findall(r'"cached_tokens":(\d+)', answer.text)
        return int(found[-1]) if found else None

    with server(shadow=True, app_options={"api_keys": ("one", "two")}) as served:
        assert cached(served, "one") is None and cached(served, "two") is None
    with server(shadow=True, app_options={"api_keys": ("one", "two"), "isolate_keys": True}) as served:
        assert [cached(served, key) for key in ("one", "two", "one", "two")] == [0, 0, 96, 96]
        assert [cached(served, key, cache_salt="s") for key in ("one", "two", "one")] == [0, 0, 96]
    with server(shadow=True, app_options={"enable_prompt_tokens_details": True}) as served:
        assert [cached(served, key) for key in ("one", "two")] == [0, 96]


def test_v8_too_long_a_prompt_is_told_as_clients_know_it(served: Served) -> None:
    long = "x " * 2000
    for path, body, param in (
        (COMPLETIONS, {"prompt": [1] * 256}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], [1] * 256]}, "prompt"),
        (COMPLETIONS, {"prompt": long}, "prompt"),
        (COMPLETIONS, {"prompt": long * 100}, "prompt"),  # not even tokenized
        (CHAT, {"messages": [{"role": "user", "content": long}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": long * 100}]}, "messages"),
    ):
        error = error_of(ask(served, path, body), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param), error
        assert "max_model_len=256" in error["message"]
    with served.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="story", prompt=long)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"
    with server(shadow=True, num_kv_blocks=4) as small:
        error = error_of(ask(small, COMPLETIONS, {"prompt": [1] * 50, "max_tokens": 100}), 400)
        assert error["code"] == "context_length_exceeded" and "num_kv_blocks=4" in error["message"]


# --- V7: names and lines ---------------------------------------------------------------------------------------------


def test_v7_every_answer_has_a_name_which_the_log_knows(caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "nanovllm.access"]

    with server(shadow=True, app_options={"access_log": True}) as served, caplog.at_level(logging.INFO):
        own = ask(served, COMPLETIONS, PROMPT, headers={"x-request-id": "mine-1"})
        assert own.headers["x-request-id"] == "mine-1" and own.json()["id"] == "cmpl-mine-1"
        for forged in "a b", "x" * 200, "ü", 'a"\\':
            answer = ask(served, COMPLETIONS, PROMPT | {"n": 0}, headers={"x-request-id": forged.encode()})
            assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"]) and answer.status_code == 400
        streamed = ask(served, "/v1/completions?secret=1", PROMPT | {"stream": True})
        assert streamed.headers["x-request-id"] in streamed.text
        ask(served, "/%0aINFO%20forged", {})
        httpx.get(served.url + "/health")
        while len(lines()) < 7:
            pass
        first, *refused, stream, strange = lines()
        assert re.fullmatch(r'127\.0\.0\.1 "POST /v1/completions" 200 \d\.\d{3}s mine-1', first)
        assert all('"POST /v1/completions" 400 ' in line for line in refused) and len(refused) == 4
        assert stream.endswith(streamed.headers["x-request-id"]) and "secret" not in stream
        assert '"POST /%0aINFO%20forged" 404 ' in strange
    caplog.clear()
    with server(shadow=True) as served, caplog.at_level(logging.DEBUG):
        ask(served, COMPLETIONS, PROMPT)
    assert not lines()


# --- V10: names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:8000", True),
        ("localhost:8000", True),
        ("LOCALHOST", True),
        ("[::1]:8000", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example:80", False),
        ("localhost@evil.example", False),
        ("[::1", False),
        ("", False),
        ("0.0.0.0:8000", False),
        ("192.168.1.1", False),
    ],
)
def test_v10_names_that_lead_to_this_machine_alone(host: str, loopback: bool) -> None:
    assert is_allowed_host(host, ["loopback"]) == loopback
    assert is_allowed_host(host, ["*"])


def test_v10_a_page_whose_name_was_made_to_lead_here_gets_nothing() -> None:
    with server(shadow=True, app_options={"allowed_hosts": ("loopback", "my.box")}) as served:
        for path in "/v1/completions", "/v1/models", "/health", "/metrics":
            for host in "evil.example", f"evil.example:{served.port}":
                error = error_of(httpx.get(served.url + path, headers={"host": host}), 403)
                assert error["code"] == "host_not_allowed" and "--allowed-hosts" in error["message"]
        for host in "localhost", "my.box:80", f"127.0.0.1:{served.port}":
            assert httpx.get(served.url + "/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        ([], ("loopback",)),
        (["--allowed-hosts", "my.box,other"], ("loopback", "my.box", "other")),
        (["--api-key", "k"], None),  # which no web page has
        (["--api-key", "k", "--allowed-hosts", "my.box"], ("my.box",)),
        (["--host", "0.0.0.0", "--insecure"], None),
    ],
)
def test_v10_by_default_a_server_without_a_key_answers_to_loopback(
    options: list[str], hosts: tuple[str, ...] | None
) -> None:
    from nanovllm.cli import parser

    args = parser().parse_args(["serve", *options])
    args.settle(args)
    assert AppOptions.chosen(args).allowed_hosts == hosts


# --- keys, pages, prefixes -------------------------------------------------------------------------------------------


def test_all_but_health_needs_a_key_and_any_of_them_will_do() -> None:
    with server(shadow=True, app_options={"api_keys": ("one", "two")}) as served:
        paths = "/v1/models", "/metrics", "/openapi.json", "/v1/completions", "/nothing", "/health/", "//health"
        for path in paths:
            for key in "x", "wrong", "one,two", "onetwo":
                error_of(httpx.get(served.url + path, headers={"authorization": f"Bearer {key}"}), 401)
        for key in "one", "two":
            headers = {"authorization": f"Bearer {key}"}
            statuses = [httpx.get(served.url + path, headers=headers).status_code for path in paths]
            assert 401 not in statuses and statuses[:2] == [200, 200]
        assert httpx.get(served.url + "/health").status_code == 200
        assert 'status="401"' in httpx.get(served.url + "/metrics", headers=headers).text


def test_pages_of_chosen_origins_may_ask_from_a_browser() -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    options = {"allowed_origins": ("https://my.page",), "api_keys": ("one",)}
    with server(shadow=True, app_options=options) as served:
        good = httpx.options(served.url + COMPLETIONS, headers=asked | {"origin": "https://my.page"})
        assert good.status_code == 200 and good.headers["access-control-allow-origin"] == "https://my.page"
        bad = httpx.options(served.url + COMPLETIONS, headers=asked | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in bad.headers
        headers = {"origin": "https://my.page"}  # so that the page can read why it was refused
        refused = ask(served, COMPLETIONS, PROMPT, headers=headers)
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://my.page"


def test_behind_a_prefix_the_same_paths_are_open() -> None:
    options = {"api_keys": ("one",)}
    with server(shadow=True, app_options=options, http_options={"root_path": "/llm"}) as served:
        assert httpx.get(served.url + "/health").status_code == 200  # the proxy has taken the prefix away
        error_of(httpx.get(served.url + "/v1/models"), 401)
        assert httpx.get(served.url + "/v1/models", headers={"authorization": "Bearer one"}).status_code == 200


# --- bodies that take long to read -----------------------------------------------------------------------------------


def test_large_bodies_that_come_together_leave_the_event_loop_breaks() -> None:
    """A process that reads many of them without a break is taken for dead, and its clients lose their answers."""
    sizes, read = [4 * BREAK_AFTER] * 3 + [100] * 50, list[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        read.append(len((await receive())["body"]))

    guard = Guard(app, AppOptions())

    async def main() -> None:
        async def send(size: int) -> None:
            async def receive() -> Any:
                return {"type": "http.request", "body": bytes(size), "more_body": False}

            await guard({"type": "http", "headers": [], "path": "/"}, receive, AsyncMock())

        sending = [asyncio.create_task(send(size)) for size in sizes]
        await asyncio.sleep(BREAK / 2)
        assert sorted(read) == sorted(sizes[2:])  # the first large body, and whoever does not hold up anybody
        await asyncio.gather(*sending)
        assert sorted(read) == sorted(sizes)
        read.clear()

    for _ in range(2):  # in an event loop each, as test clients have it
        asyncio.run(asyncio.wait_for(main(), 5))
