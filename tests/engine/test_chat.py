"""Chat messages reach the model as its template wants them, and every word of them (CASES D7)."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nanovllm.text.chat import ChatTemplate, as_parts, num_characters, walks_over_content

STRING, PARTS, BOTH = (True, False), (False, True), (True, True)
LOOP = "{% for p in {} %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}".replace("{}", "CONTENT")

TEMPLATES: dict[str, tuple[str, tuple[bool, bool]]] = {
    "added": ("{% for m in messages %}{{ m.role + ': ' + m['content'] + '\n' }}{% endfor %}", STRING),
    "printed": ("{% for m in messages %}{{ m.content }}\n{% endfor %}", STRING),
    "trimmed": ("{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}", STRING),
    "as JSON": ("{% for m in messages %}{{ m.content | tojson }}\n{% endfor %}", STRING),
    "loop": ("{% for m in messages %}" + LOOP.replace("CONTENT", "m.content") + "\n{% endfor %}", PARTS),
    "filter": ("{% for m in messages %}{{ m.content | map(attribute='text') | join(' ') }}{% endfor %}", PARTS),
    "both": (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        + LOOP.replace("CONTENT", "m['content']") + "{% endif %}\n{% endfor %}",
        BOTH,
    ),
    "first part": ("{% for m in messages %}{{ m.content[0].text }}\n{% endfor %}", (False, False)),
    "first part or string": (
        "{% for m in messages %}{{ m.content if m.content is string else m.content[0]['text'] }}\n{% endfor %}", STRING
    ),
    "macro": (
        "{% macro say(x) %}" + LOOP.replace("CONTENT", "x") + "{% endmacro %}"
        "{% for m in messages %}{{ say(m.content) }}\n{% endfor %}",
        PARTS,
    ),
    "behind the first": ("{% for m in messages[1:] %}" + LOOP.replace("CONTENT", "m.content") + "{% endfor %}", PARTS),
    "behind the first, added": ("{% for m in messages[1:] %}{{ '[' + m.content + ']' }}{% endfor %}", STRING),
    "for training": (
        "{% for m in messages %}{% generation %}{{ m.content }}{%- endgeneration -%}{% endfor %}", STRING
    ),
    # No probe is rendered: the template wants a conversation that no probe is.
    "undecided loop": (
        "{% if messages | length < 9 %}{{ raise_exception('more!') }}{% endif %}"
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set c = m['content'] %}"
        + LOOP.replace("CONTENT", "c") + "{% endfor %}",
        PARTS,
    ),
    "undecided macro": (
        "{% macro inner(what) %}" + LOOP.replace("CONTENT", "what[1:]") + "{% endmacro %}"
        "{% macro outer(m, content=none) %}{{ inner(what=content or '') }}{% endmacro %}"
        "{% if messages | length < 9 %}{{ raise_exception('more!') }}{% endif %}"
        "{% for m in messages %}{% generation %}{{ outer(m, m.get('content')) }}{% endgeneration %}{% endfor %}",
        PARTS,
    ),
    "undecided both": (
        "{{ raise_exception('more!') }}{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        + LOOP.replace("CONTENT", "m.content") + "{% endif %}{% endfor %}",
        BOTH,
    ),
    "undecided": ("{{ raise_exception('more!') }}{% for m in messages %}{{ m.content }}{% endfor %}", STRING),
}  # fmt: skip


def hf(template: str | dict[str, str] | None) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"?": 0}, unk_token="?")))
    tokenizer.chat_template = template
    return tokenizer


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


PIECES = [{"type": "text", "text": "red kite"}, {"type": "text", "text": "{blue} 🦊"}]


@pytest.mark.parametrize(("template", "takes"), TEMPLATES.values(), ids=TEMPLATES.keys())
def test_which_content_a_template_takes(template: str, takes: tuple[bool, bool]) -> None:
    assert ChatTemplate(hf(template)).takes("user") == takes


@pytest.mark.parametrize("name", [name for name in TEMPLATES if "undecided" not in name])
@pytest.mark.parametrize("content", ["red kite", PIECES], ids=["string", "parts"])
def test_the_users_words_are_in_the_prompt(name: str, content: Any) -> None:
    template, takes = TEMPLATES[name]
    system = "Be kind." if takes[0] else as_parts("Be kind.")
    messages = [{"role": "system", "content": system}, user(content)]
    text = ChatTemplate(hf(template)).render(messages)
    assert "red kite" in text and ("blue" in text) == (content is PIECES)
    assert "'type'" not in text and '"type"' not in text
    assert ("Be kind." in text) == ("behind" not in name)
    if takes == STRING and content is PIECES:
        assert text == ChatTemplate(hf(template)).render([messages[0], user("red kite\n{blue} 🦊")])
    if takes[0] if content == "red kite" else takes[1]:  # what the caller says is what Hugging Face gets
        assert text == hf(template).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_roles_may_differ() -> None:
    """A system message that is added, and user messages that are walked over, as templates for images have it."""
    template = "{{ '<' + messages[0].content + '>' }}{% for m in messages[1:] %}" + LOOP.replace("CONTENT", "m.content")
    chat = ChatTemplate(hf(template + "{% endfor %}"))
    assert (chat.takes("system"), chat.takes("user")) == (STRING, PARTS)
    for system in "Be kind.", as_parts("Be kind."):
        for content in "red kite", as_parts("red kite"):
            assert chat.render([{"role": "system", "content": system}, user(content)]) == "<Be kind.>red kite"


def test_other_fields_of_messages_reach_the_template() -> None:
    chat = ChatTemplate(hf("{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}"))
    assert chat.render([user(PIECES) | {"name": "Nell"}]) == "Nell: red kite\n{blue} 🦊"


def refused(template: str | None, messages: Any) -> str:
    with pytest.raises(ValueError) as caught:
        ChatTemplate(hf(template)).render(messages)
    return str(caught.value)


def test_the_reason_of_a_template_reaches_the_caller() -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('Users speak first!') }}{% endif %}"
    assert "refuses the messages: Users speak first!" in refused(template, [{"role": "system", "content": "x"}])
    assert "refuses the messages" in refused("{{ messages[3].content.more }}", [user("x")])
    assert "refuses the messages" in refused("{{ 1 // 0 }}", [user("x")])
    assert len(refused("{{ raise_exception('x' * 100000) }}", [user("x")])) < 1000
    assert "no chat template" in refused(None, [user("x")])


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "'role' and 'content'"),
        ([{"role": "user"}], "'role' and 'content'"),
        ([user(None)], r"messages[0]['content'] must be a string or a list of parts"),
        ([user("x"), user([{"type": "image_url", "image_url": "x"}])], "messages[1]['content'] must be"),
        ([user(["x"])], "messages[0]['content'] must be"),
        ([user({"type": "text", "text": "x"})], "messages[0]['content'] must be"),
        ([user("\ud800")], "half a surrogate pair"),
        ([{"role": 5, "content": "x"}], "messages[0]['role'] must be a string"),
    ],
)
def test_what_is_no_conversation_in_text_is_refused_by_name(messages: Any, told: str) -> None:
    assert told in refused("{{ messages }}", messages)


def test_a_template_with_a_syntax_error_warns_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for fine in None, "{{ raise_exception('never') }}", "{{ messages[7].content }}":
            ChatTemplate(hf(fine))
        assert not caplog.records
        broken = ChatTemplate(hf("a\n{% for m in messages %}{{ m.content }}"))
    assert "chat template" in caplog.text and "line 2" in caplog.text and "endfor" in caplog.text
    with pytest.raises(ValueError, match="endfor"):
        broken.render([user("x")])


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_syntax_tree_knows_who_walks_over_parts(name: str) -> None:
    template, (string, parts) = TEMPLATES[name]
    assert walks_over_content(template)[0] == parts
    if parts:
        assert walks_over_content(template)[1] == string


def test_the_length_of_a_message() -> None:
    lengths: list[Callable[[Any], Any]] = [lambda m: m, lambda m: user(as_parts(m["content"]))]
    assert [num_characters(make(user("four"))) for make in lengths] == [4, 5]
