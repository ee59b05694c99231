"""What clients send beside what is used: accepted where it changes nothing, refused by name where it would."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import openai
import pytest

from nanovllm import __version__
from nanovllm.llm import EMBEDDED_MODEL
from nanovllm.server.openai.chat import ChatMessage, ChatRequest
from nanovllm.server.openai.protocol import CompletionRequest, StreamOptions
from nanovllm.server.openai.tolerance import HARMLESS, MOST_NAMES, NO_MATTER, nearest
from tests.server.harness import STORY, Served, chat_model, server
from tests.server.test_errors import CHAT, COMPLETIONS, ask, error_of
from tests.server.test_openai import MESSAGES, chat, complete
from tests.server.test_process import ROOT

BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": STORY, "max_tokens": 6, "temperature": 0},
    CHAT: {"messages": MESSAGES, "max_tokens": 6, "temperature": 0},
}
NOTHING = {
    "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "echo": False, "best_of": 1,
    "logit_bias": {}, "stop": "", "store": True, "metadata": {"a": "b"}, "parallel_tool_calls": True,
    "service_tier": "auto", "seed": -1, "user": "me", "functions": [], "function_call": "none", "suffix": "",
    "stream_options": {"include_usage": True}, "prompt_cache_key": "k", "bad_words": [], "use_beam_search": False,
    "modalities": ["text"], "a_field_of_tomorrow": {"x": [1]},
}  # fmt: skip


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("path", BODIES)
def test_what_changes_nothing_is_accepted_and_changes_nothing(served: Served, path: str) -> None:
    body = BODIES[path]
    plain = text_of(ask(served, path, body))
    assert plain == text_of(ask(served, path, body | NOTHING))
    harmless = {name: values[-1] for name, values in HARMLESS.items() if values}
    assert plain == text_of(ask(served, path, body | harmless))
    assert plain == text_of(ask(served, path, body | dict.fromkeys(HARMLESS)))  # null is as good as absent


@pytest.mark.parametrize("name", HARMLESS)
def test_what_would_change_the_answer_is_refused_by_its_name(name: str) -> None:
    for value in ({"type": "json_object"}, [{"type": "function"}], "required", True, 7):
        if any(value == harmless and type(value) is type(harmless) for harmless in HARMLESS[name]):
            continue
        for kind, rest in (CompletionRequest, {"prompt": "a"}), (ChatRequest, {"messages": MESSAGES}):
            if name in kind.model_fields:  # used by this endpoint
                continue
            with pytest.raises(ValueError, match="would change the answer") as caught:
                kind.model_validate({**rest, name: value})
            assert caught.value.errors()[0]["ctx"]["field"] == name  # type: ignore[attr-defined]


def test_a_refusal_says_what_would_be_accepted(served: Served) -> None:
    error = error_of(ask(served, COMPLETIONS, {"prompt": "a", "tool_choice": "required"}), 400)
    assert error["param"] == "tool_choice" and '"none" or "auto"' in error["message"]
    error = error_of(ask(served, COMPLETIONS, {"prompt": "a", "best_of": True}), 400)  # true is not 1
    assert error["param"] == "best_of"
    error = error_of(ask(served, COMPLETIONS, {"prompt": "a", "repeat_penalty": 1.1}), 400)
    assert "repetition_penalty" in error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_a_value_may_be_said_twice_by_two_names(served: Served, path: str) -> None:
    """As clients do that were written for several servers."""
    body = BODIES[path] | {"repetition_penalty": 1.3}
    twice = body | {"max_new_tokens": body["max_tokens"], "repeat_penalty": 1.3, "n_predict": body["max_tokens"]}
    twice |= {"n": 2, "num_return_sequences": 2, "stop": ["§"], "stop_sequences": ["§"], "system": None}
    assert text_of(ask(served, path, twice)) == text_of(ask(served, path, body))
    for name, value in ("max_new_tokens", 7), ("repeat_penalty", 1.1):
        assert error_of(ask(served, path, twice | {name: value}), 400)["param"] == name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("tempertaure", "temperature"),
        ("temperaturee", "temperature"),
        ("xtemperature", "temperature"),
        ("top_a", None),
        ("stop_", "stop"),
        ("m", None),  # known names of a letter or two are near to everything
        ("in", None),
        ("top_q", None),
        ("reasoning_effort", None),
        ("verbosity", None),
    ],
)
def test_a_slip_of_the_pen_is_told_from_a_field_of_somebody_else(name: str, meant: str | None) -> None:
    known = [*CompletionRequest.model_fields]
    if name.startswith("top_"):  # one letter from top_k and top_p, which it may well have been meant to be
        assert nearest(name, known) in ("top_k", "top_p")
    else:
        assert nearest(name, known) == meant
    assert all(nearest(one, [other for other in known if other != one]) in (None, "top_k", "top_p") for one in known)


def test_unknown_names_come_into_the_log_once_and_not_for_ever(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    def named() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "nanovllm.server.openai.tolerance"]

    with server(shadow=True) as fresh, caplog.at_level(logging.INFO):
        body = {"prompt": [1], "max_tokens": 1, "strange\nfield": 1, "stream_options": {"new": 1}}
        for _ in range(3):
            assert ask(fresh, COMPLETIONS, body).status_code == 200
        first, second = named()
        assert "'strange\\nfield'" in first and "'stream_options.new'" in second
        for i in range(3):
            more = {f"made up {i} {j}": 1 for j in range(90)}
            assert ask(fresh, COMPLETIONS, {"prompt": [1], "max_tokens": 1, **more}).status_code == 200
        assert len(named()) == MOST_NAMES


def test_messages_may_have_more_than_is_used(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    part = {"type": "text", "text": STORY, "cache_control": {"type": "ephemeral"}}
    rich = [
        {"role": "user", "content": "a", "name": "me", "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "content": None, "tool_calls": [], "reasoning_content": "hm", "refusal": None},
        {"role": "user", "content": [part], "annotations": []},
    ]
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}, {"role": "user", "content": STORY}]
    with caplog.at_level(logging.INFO):
        answers = [text_of(ask(served, CHAT, BODIES[CHAT] | {"messages": messages})) for messages in (rich, plain)]
    assert answers[0] == answers[1]
    assert any("'messages[].annotations'" in record.getMessage() for record in caplog.records)
    error = error_of(ask(served, CHAT, {"messages": [{"role": "user"}]}), 400)
    assert error["param"] == "messages.0.content"


def test_the_seed_of_another_world_is_a_seed_and_minus_one_is_none(client: openai.OpenAI) -> None:
    def say(seed: int) -> str:
        return str(complete(client, seed=seed, max_tokens=8, temperature=1.5).choices[0].text)

    assert say(-5) == say(-5) == say(2**63 - 5) != say(5)
    assert len({say(-1) for _ in range(3)}) > 1


def test_the_documentation_says_of_every_field_what_is_done_with_it() -> None:
    document = (ROOT / "docs" / "server.md").read_text("utf-8")
    table = document.partition("## What a request may say")[2].partition("## What goes wrong")[0]
    for kind in CompletionRequest, ChatRequest, StreamOptions, ChatMessage:
        for name in kind.model_fields.keys() - {"role", "content"}:
            assert f"`{name}" in table, name
    for name in NO_MATTER:
        assert f"`{name}`" in table, name
    for name, values in HARMLESS.items():
        said = f"`{name}`: " + " or ".join(f"`{json.dumps(value)}`" for value in values) if values else f"`{name}`"
        assert said in table, name


# --- streams, ids, truncation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask_for", [complete, chat])
def test_usage_may_be_told_all_along(client: openai.OpenAI, ask_for: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask_for(client, stream=True, stream_options=options))
    numbers = [chunk.usage.completion_tokens for chunk in chunks]
    assert numbers == sorted(numbers) and numbers[-1] == 12 and len(chunks) > 2 and chunks[-1].choices == []
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1 and chunks[0].usage.prompt_tokens > 0
    assert all(
        chunk.usage.total_tokens == chunk.usage.prompt_tokens + n for chunk, n in zip(chunks, numbers, strict=True)
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("ask_for", [complete, chat])
def test_token_ids_are_told_where_asked_for(client: openai.OpenAI, served: Served, ask_for: Any, stream: bool) -> None:
    answer = ask_for(client, n=2, stream=stream, extra_body={"return_token_ids": True})
    parts = list(answer) if stream else [answer]
    in_choices = ask_for is complete
    ids: dict[int, list[int]] = {0: [], 1: []}
    texts = {0: "", 1: ""}
    prompts = []
    for part in parts:
        prompts += [] if in_choices else [part.model_extra.get("prompt_token_ids")]
        for choice in part.choices:
            ids[choice.index] += (choice.model_extra or {}).get("token_ids") or []
            texts[choice.index] += (
                choice.text if in_choices else (choice.delta if stream else choice.message).content or ""
            )
            prompts += [choice.prompt_token_ids] if in_choices else []
    tokenizer = served.llm.llm.tokenizer
    expected = tokenizer.encode(STORY) if in_choices else tokenizer.encode_chat(MESSAGES)
    assert prompts[0] == expected and all(prompt in (None, expected) for prompt in prompts)
    assert [len(tokens) for tokens in ids.values()] == [12, 12]
    assert {index: tokenizer.decode(tokens) for index, tokens in ids.items()} == texts
    assert "token_ids" not in ask(served, COMPLETIONS, BODIES[COMPLETIONS]).text


def test_a_prompt_may_be_cut_from_the_front(served: Served) -> None:
    tokens = served.llm.llm.tokenizer.encode(STORY)

    def prompt_of(body: dict[str, Any]) -> list[int]:
        answer = ask(served, COMPLETIONS, {"max_tokens": 2, "return_token_ids": True} | body)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["prompt_token_ids"])

    assert prompt_of({"prompt": STORY, "truncate_prompt_tokens": 3}) == tokens[-3:]
    assert prompt_of({"prompt": STORY, "truncate_prompt_tokens": 3000}) == tokens
    many = list(range(1, 301))
    assert prompt_of({"prompt": many, "truncate_prompt_tokens": -1}) == many[-254:]  # of max_model_len=256, but for 2
    error_of(ask(served, COMPLETIONS, {"prompt": many}), 400)
    body = BODIES[CHAT] | {"truncate_prompt_tokens": 4, "return_token_ids": True}
    assert ask(served, CHAT, body).json()["prompt_token_ids"] == served.llm.llm.tokenizer.encode_chat(MESSAGES)[-4:]


# --- templates -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}{{ mood }}"
    )
    model = chat_model(tmp_path_factory.mktemp("thinking"))
    with server(model, {"chat_template": template}) as running:
        yield running


def prompt_text(served: Served, messages: list[dict[str, Any]], **more: Any) -> str:
    response = ask(served, "/tokenize", {"messages": messages, **more})
    assert response.status_code == 200, response.text
    said = ask(served, "/detokenize", {"tokens": response.json()["tokens"]})
    return str(said.json()["prompt"])


@pytest.mark.slow
def test_another_template_and_what_clients_may_tell_it(thinking: Served) -> None:
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": "a"}]
    begin = "system: be\nuser: a\n"
    assert prompt_text(thinking, messages) == begin
    assert prompt_text(thinking, messages, chat_template_kwargs={"enable_thinking": False}) == begin + "quick"
    assert prompt_text(thinking, messages, chat_template_kwargs={"enable_thinking": True, "mood": "ü"}) == begin + "ü"
    body = {"messages": messages, "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": False}}
    answer = ask(thinking, CHAT, body | {"return_token_ids": True}).json()
    assert thinking.llm.llm.tokenizer.decode(answer["prompt_token_ids"]) == begin + "quick"
    for name in "messages", "chat_template", "tokenize", "a b", "self", "conversations":
        error = error_of(ask(thinking, CHAT, body | {"chat_template_kwargs": {name: 1}}), 400)
        assert error["param"] == "chat_template_kwargs" and name in error["message"]
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    assert ask(thinking, CHAT, body | {"chat_template_kwargs": {"x": deep}}).status_code in (200, 400)


def test_an_answer_may_continue_the_last_message(served: Served) -> None:
    """Its prompt ends with that message, and the answer is what a completion of this prompt is."""
    begun = [*MESSAGES, {"role": "assistant", "content": "It was"}]
    goes_on: dict[str, Any] = {"messages": begun, "add_generation_prompt": False, "continue_final_message": True}
    assert prompt_text(served, begun, add_generation_prompt=False) == f"{STORY}\nIt was\n"
    assert prompt_text(served, **goes_on) == f"{STORY}\nIt was"
    answer = text_of(ask(served, CHAT, BODIES[CHAT] | goes_on))
    assert answer == text_of(ask(served, COMPLETIONS, BODIES[COMPLETIONS] | {"prompt": f"{STORY}\nIt was"}))
    in_parts = [{"type": "text", "text": "It"}, {"type": "text", "text": "was"}]
    goes_on["messages"] = [*MESSAGES, {"role": "assistant", "content": in_parts}]
    assert prompt_text(served, **goes_on) == f"{STORY}\nIt\nwas"
    for path, body in (CHAT, BODIES[CHAT]), ("/tokenize", {"messages": MESSAGES}):
        error = error_of(ask(served, path, body | {"continue_final_message": True}), 400)
        assert error["param"] == "continue_final_message" and "add_generation_prompt" in error["message"]


def test_a_template_file_is_an_option(tmp_path: Path) -> None:
    from nanovllm.server.options import AppOptions, check
    from tests.server.test_options import settled

    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}", "utf-8")
    args = settled("--chat-template", str(file))
    check(args)
    assert AppOptions.chosen(args).chat_template == "{{ messages }}"
    assert AppOptions.chosen(settled()).chat_template is None
    with pytest.raises(ValueError, match="--chat-template /no/file"):
        check(settled("--chat-template", "/no/file"))


# --- other paths -----------------------------------------------------------------------------------------------------


def test_texts_become_tokens_and_come_back(served: Served) -> None:
    tokenizer = served.llm.llm.tokenizer
    found = ask(served, "/tokenize", {"prompt": STORY, "return_token_strs": True}).json()
    assert found["tokens"] == tokenizer.encode(STORY) and found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 256 and "".join(found["token_strs"]).endswith("kite.")
    assert ask(served, "/tokenize", {"prompt": ""}).json()["count"] == len(tokenizer.encode(""))
    assert ask(served, "/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": STORY}
    assert ask(served, "/detokenize", {"tokens": []}).json() == {"prompt": ""}
    with patch.object(served.llm.llm.engine, "vocab_size", tokenizer.fast.get_vocab_size() + 7):  # rows to spare
        rows = [*found["tokens"], tokenizer.fast.get_vocab_size() + 6]
        assert ask(served, "/detokenize", {"tokens": rows}).json() == {"prompt": tokenizer.hf.decode(rows)}
        rows.append(rows[-1] + 1)
        assert f"tokens has {rows[-1]}" in error_of(ask(served, "/detokenize", {"tokens": rows}), 400)["message"]
    for body in {}, {"prompt": "a", "messages": MESSAGES}, {"prompt": "x" * 10**6}, {"prompt": 5}:
        error_of(ask(served, "/tokenize", body), 400)
    for tokens in [-1], [10**6], [10**30], ["a"], 5:
        assert error_of(ask(served, "/detokenize", {"tokens": tokens}), 400)["param"].startswith("tokens")


def test_the_small_paths(served: Served) -> None:
    models = [httpx.get(f"{served.url}/v1/models{slash}").json() for slash in ("", "/")]
    assert models[0] == models[1] and models[0]["object"] == "list"
    assert httpx.get(served.url + "/version").json() == {"version": __version__}
    head = httpx.head(served.url + "/health")
    assert head.status_code == 200 and head.content == b""
    assert httpx.get(served.url + "/ping").status_code == httpx.post(served.url + "/ping").status_code == 200


def test_a_path_that_there_is_not_tells_those_that_there_are(served: Served) -> None:
    for path in "/v1/embeddings", "/nothing":
        error = error_of(ask(served, path, {}), 404)
        assert "POST /v1/chat/completions" in error["message"] and "GET /metrics" in error["message"]
    with served.client() as client, pytest.raises(openai.NotFoundError, match="POST /v1/completions"):
        client.embeddings.create(model="story", input="a")
    assert "POST /v1/completions" in error_of(httpx.get(served.url + COMPLETIONS), 405)["message"]


@pytest.mark.slow
def test_offline_takes_the_same_variables(tmp_path: Path) -> None:
    """The renderer of the server and that of `transformers` are given the same."""
    from nanovllm.text.render import Renderer
    from nanovllm.text.tokenizer import Tokenizer

    here, there = Tokenizer(EMBEDDED_MODEL), Tokenizer(EMBEDDED_MODEL)
    there.renderer = Renderer()
    for tokenizer in here, there:
        tokenizer.hf.chat_template = "{{ messages[0].content }}{{ mood }}{{ eos_token }}"
    try:
        said = [tokenizer.encode_chat(MESSAGES, mood="{}") for tokenizer in (here, there)]
        assert said[0] == said[1]
    finally:
        there.renderer.close()
