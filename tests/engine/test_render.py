"""Chat templates that come from strangers: rendered like everywhere, and within bounds."""

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from nanovllm.text import render
from nanovllm.text.chat import ChatTemplate
from nanovllm.text.render import Renderer, TemplateTooExpensive, TemplateTooSlow
from tests.engine.test_chat import PIECES, TEMPLATES, hf, user
from tests.engine.test_chat_tools import ANSWER, FAMILIES, R1, TOOLS, call

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{{ BODY }}"
LOOP += "{% endfor %}" * 3
HOSTILE = {
    "endless": LOOP.replace("{{ BODY }}", ""),
    "endless and silent": LOOP.replace("{{ BODY }}", "{% set x = a * b %}"),
    "endless text": LOOP.replace("BODY", "'x' * 1000"),
    "one long text": "{{ 'x' * (10 ** 11) }}",
    "a text too long for us": "{{ 'x' * (10 ** 8) }}",
    "a great number": "{{ 9 ** (9 ** 9) }}",
    "padding": "{{ 'x' | center(10 ** 11) }}",
    "a list": "{{ [0] * (10 ** 10) }}",
    "doubling": "{% set n = namespace(x='xxxxxxxx') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "recursion": "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    running = Renderer()
    yield running
    running.close()


def test_a_template_makes_the_same_of_messages_in_the_child(renderer: Renderer) -> None:
    others: list[dict[str, Any]] = [
        {"role": "system", "content": "be"},
        {"role": "assistant", "content": "ok", "name": None},
        user("ümläut 🦊\n{{x}}"),
    ]
    for template, _ in list(TEMPLATES.values())[::2]:
        here, there = ChatTemplate(hf(template)), ChatTemplate(hf(template), renderer)
        assert here.takes("user") == there.takes("user")
        for messages in [user("a")], [user(PIECES)], others, []:
            results = []
            for chat in here, there:
                try:
                    results.append(chat.render(messages))
                except ValueError as error:
                    results.append(f"refused: {error}")
            assert results[0] == results[1]


@pytest.mark.parametrize("template", [*FAMILIES.values(), R1], ids=[*FAMILIES, "R1"])
def test_tools_and_calls_are_the_same_in_the_child(template: str, renderer: Renderer) -> None:
    messages, tools = [user("Where?"), call(), ANSWER], None if template == R1 else TOOLS
    text = ChatTemplate(hf(template), renderer).render(messages, tools=tools)
    assert text == ChatTemplate(hf(template)).render(messages, tools=tools)
    assert all(word in text for word in ("find_kite", "röd" if template != R1 else "colour", "in the tree"))


def test_special_tokens_are_known_there_too(renderer: Renderer) -> None:
    tokenizer = hf("{{ bos_token }}|{{ eos_token }}|{{ add_generation_prompt }}|{{ messages[0].content }}")
    tokenizer.add_special_tokens({"bos_token": "<b>", "eos_token": "<e>"})
    assert ChatTemplate(tokenizer, renderer).render([user("a")]) == "<b>|<e>|True|a"
    assert ChatTemplate(tokenizer).render([user("a")]) == "<b>|<e>|True|a"


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_template_costs_some_seconds_once_and_no_memory_here(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    renderer = Renderer(seconds=2)
    tokenizer = hf(HOSTILE[kind])
    began = time.perf_counter()
    chat = ChatTemplate(tokenizer, renderer)
    for _ in range(3):
        with pytest.raises(ValueError, match="template"):
            chat.render([user("a")])
    assert time.perf_counter() - began < 30
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert ChatTemplate(tokenizer, renderer).render([user("still here")]) == "still here"
    renderer.close()
    assert caplog.records and "the chat template cannot be used" in caplog.records[0].getMessage()


@pytest.mark.slow
def test_a_template_that_takes_too_long_is_given_up_and_the_next_is_rendered() -> None:
    renderer = Renderer(seconds=0.5)
    with pytest.raises(TemplateTooExpensive, match=r"more than 0\.5 s"):
        renderer.render([user("a")], chat_template=HOSTILE["endless"])
    assert renderer.render([user("a")], chat_template="{{ messages[0].content }}") == "a"
    child = renderer._child
    renderer.close()
    assert child is not None and child.poll() is not None


def test_a_template_that_is_only_slow_is_tried_again() -> None:
    class Busy(Renderer):
        has_time = False

        def render(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
            if not self.has_time:
                raise TemplateTooSlow("no time")
            return "".join(message["content"] for message in messages)

    renderer = Busy()
    chat = ChatTemplate(hf("never rendered"), renderer)
    for _ in range(2):
        with pytest.raises(TemplateTooSlow):
            chat.render([user("a")])
    renderer.has_time = True
    assert chat.render([user("a")]) == "a"


@pytest.mark.slow
def test_a_child_without_time_proves_nothing_and_is_replaced() -> None:
    renderer = Renderer(seconds=0.5)
    chat = ChatTemplate(hf("{% for m in messages %}{{ m.content }}{% endfor %}"), renderer)
    child = renderer._child
    assert child is not None and chat.render([user("a")]) == "a"
    child.send_signal(signal.SIGSTOP)
    with pytest.raises(TemplateTooSlow, match=r"within 2 s"):
        chat.render([user("b")])
    assert child.returncode == render.KILLED and chat.render([user("b")]) == "b"
    renderer.close()


def test_a_template_may_not_make_more_than_a_prompt_could_hold() -> None:
    assert render.CHARACTERS < 10**8 < render.MEMORY  # so that one of the hostile ones is caught by this alone


def test_what_one_client_says_does_not_take_the_template_from_others(renderer: Renderer) -> None:
    """A conversation that is too expensive is refused; the template stays in use."""
    squares = "{% for m in messages %}{{ m.content * m.content | length }}{% endfor %}"
    chat = ChatTemplate(hf(squares), renderer)
    with pytest.raises(ValueError, match=r"33554432|memory|took more"):
        chat.render([user("x" * 20_000)])
    assert chat.render([user("ab")]) == "abab"
