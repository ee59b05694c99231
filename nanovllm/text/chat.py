"""Turns chat messages into a prompt by the template of the checkpoint, offline and in the server alike."""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

from nanovllm.text.render import Renderer, TemplateSyntax, TemplateTooExpensive

logger = logging.getLogger(__name__)

# {"role": "user", "content": "..."}, or a list of text parts as content: [{"type": "text", "text": "..."}, ...]
Message: TypeAlias = Mapping[str, Any]
PROBE = "nanovllmprobe"
PROBE_IN_DICT = re.compile(rf"""text\\?["']\s*:\s*\\?["']{PROBE}""")  # how a dict or JSON shows a part
MAX_REASON = 500  # characters


class ChatTemplate:
    """What a template makes of messages.

    Some templates want a string as content, some walk over a list of parts, some take both. Content in the wrong form
    would be lost silently, or its dict would be printed into the prompt. So each role's form is found out: a
    message with a probe is rendered in both forms, to see which form brings the probe into the prompt. Where neither
    does, the template's syntax tree tells whether the template walks over a message's content.
    """

    def __init__(self, tokenizer: Any, renderer: Renderer | None = None) -> None:
        """`tokenizer` is one of `transformers`. `renderer`: for templates that are not trusted; without one, they are
        rendered here. Logs a warning if the template cannot be used: it has a syntax error, or goes beyond the bounds
        of the renderer."""
        from jinja2 import TemplateSyntaxError  # slow to import

        self._tokenizer, self._renderer = tokenizer, renderer
        self._unusable: str | None = None
        self.takes = cache(self._takes)
        if tokenizer.chat_template:
            try:
                self._apply([{"role": "user", "content": PROBE}])
            except (TemplateSyntaxError, TemplateSyntax) as error:
                logger.warning("the chat template cannot be used: %s (line %d); mend it", error, error.lineno)
            except TemplateTooExpensive as error:
                self._unusable = str(error)  # which is not tried again: each time would cost as much
                logger.warning("the chat template cannot be used: %s; mend it", error)
            except Exception:  # the template wants another conversation
                pass

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt, up to the beginning of the model's answer; that too, unless `add_generation_prompt` is false.
        `variables`: what else the template may ask for.

        Raises ValueError if `messages` are not chat messages, if there is no template, or if the template refuses the
        messages, with the template's own reason.
        """
        check_messages(messages)
        if not self._tokenizer.chat_template:
            raise ValueError("this model has no chat template, so it cannot chat; use generate or /v1/completions")
        if self._unusable is not None:
            raise ValueError(f"this model's chat template cannot be used: {self._unusable}")
        try:
            return self._apply([self._prepared(m) for m in messages], add_generation_prompt, **variables)
        except Exception as error:  # a template is a program
            reason = (str(error) or type(error).__name__)[:MAX_REASON]
            raise ValueError(f"the chat template refuses the messages: {reason}") from error

    def _apply(self, messages: list[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        hf, variables = self._tokenizer, {**variables, "add_generation_prompt": add_generation_prompt}
        if self._renderer is not None:
            more = {**hf.special_tokens_map, **variables, "chat_template": hf.get_chat_template()}
            return self._renderer.render(messages, **more)
        text: str = hf.apply_chat_template(messages, tokenize=False, **variables)
        return text

    def _prepared(self, message: Message) -> Message:
        """The message with its content in a form that the template takes: the caller's form where possible."""
        content = message["content"]
        takes_string, takes_parts = self.takes(message["role"])
        if takes_string if isinstance(content, str) else takes_parts:
            return message
        joined = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        return {**message, "content": joined if takes_string else as_parts(joined)}

    def _takes(self, role: str) -> tuple[bool, bool]:
        """Whether the template takes strings, and whether it takes lists of several parts, as content of this role. A
        template that takes neither looks at the first part only."""
        parts = as_parts(PROBE) + as_parts(PROBE[::-1])
        for roles, place in conversations(role):
            found = self._brings(roles, place, PROBE), self._brings(roles, place, parts)
            if any(found) or self._brings(roles, place, parts[:1]):
                return found
        walks, asks = walks_over_content(self._tokenizer.get_chat_template())
        return not walks or asks, walks

    def _brings(self, roles: Sequence[str], place: int, content: Any) -> bool:
        """Whether the content with the probe, of the message at `place`, arrives in the prompt as it should."""
        for other in "x", as_parts("x"):  # which form the other messages want may not be known yet
            messages: list[Message] = [{"role": role, "content": other} for role in roles]
            messages[place] = {"role": roles[place], "content": content}
            try:
                text = self._apply(messages)
            except TemplateTooExpensive as error:
                self._unusable = str(error)
                raise
            except Exception:  # not a conversation that this template takes
                continue
            if PROBE in text:
                words = [PROBE] if isinstance(content, str) else [part["text"] for part in content]
                return all(word in text for word in words) and not PROBE_IN_DICT.search(text)
        return False


def check_messages(messages: Sequence[Message]) -> None:
    """Raises ValueError for what is not a conversation in text."""
    if not messages or not all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages):
        raise ValueError(f"messages must be dicts with 'role' and 'content', one at least; got {messages!r}")
    for i, message in enumerate(messages):
        if not isinstance(message["role"], str):
            raise ValueError(f"messages[{i}]['role'] must be a string; got {message['role']!r}")
        content = message["content"]
        parts = as_parts(content) if isinstance(content, str) else content
        if not isinstance(parts, list | tuple) or not all(is_text_part(part) for part in parts):
            raise ValueError(
                f"chat refuses the messages: messages[{i}]['content'] must be a string or a list of parts like "
                f"{{'type': 'text', 'text': '...'}}; got {content!r}"
            )
        if any("\ud800" <= c <= "\udfff" for part in parts for c in part["text"]):
            raise ValueError(f"messages[{i}]['content'] has half a surrogate pair, which is no character")


def as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def num_characters(message: Message) -> int:
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(part["text"]) + 1 for part in content)


def conversations(role: str) -> list[tuple[list[str], int]]:
    """The roles of conversations to try, and the place of a message of this role in them. Templates differ in which
    conversations they take and which messages they look at; the longest that a template takes tells most."""
    if role == "system":
        return [(["system", "user", "assistant", "user"], 0), (["system", "user"], 0)]
    if role == "user":
        turns = ["user", "assistant", "user"]
        return [(["system", *turns], 3), (turns, 2), (["system", "user"], 1), (["user"], 0)]
    return [(["system", "user", role, "user"], 2), (["user", role, "user"], 1), (["user", role], 1)]


def walks_over_content(template: str) -> tuple[bool, bool]:
    """Whether a template walks over the content of a message, itself or in a macro; and whether it asks if something is
    a string, as templates do that take both.

    Content is followed through variables, filters and the arguments of macros, by name, wherever they are.
    """
    from jinja2 import Environment, nodes

    # `generation` marks the assistant's words for training. Only the environment of `transformers` knows that tag.
    source = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", template)
    tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    macros = {macro.name: [arg.name for arg in macro.args] for macro in tree.find_all(nodes.Macro)}
    names: set[str] = set()

    def is_content(node: nodes.Node | None) -> bool:
        match node:
            case nodes.Name():
                return node.name in names
            case nodes.Getattr():
                return node.attr == "content"
            case nodes.Getitem():
                if isinstance(node.arg, nodes.Slice):
                    return is_content(node.node)
                return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
            case nodes.Filter():
                return is_content(node.node)
            case nodes.CondExpr():
                return is_content(node.expr1) or is_content(node.expr2)
            case nodes.Or():
                return is_content(node.left) or is_content(node.right)
            case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value="content"), *_]):
                return True
        return False

    num_names = -1
    while len(names) > num_names:  # until nothing new is found to be content
        num_names = len(names)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and is_content(assign.node):
                names.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                arguments = list(zip(macros[call.node.name], call.args, strict=False))
                arguments += [(keyword.key, keyword.value) for keyword in call.kwargs]
                names.update(name for name, value in arguments if is_content(value))

    by_loop = any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
    by_filter = any(
        filter.name in {"map", "selectattr", "rejectattr"} and is_content(filter.node)
        for filter in tree.find_all(nodes.Filter)
    )
    return by_loop or by_filter, any(test.name == "string" for test in tree.find_all(nodes.Test))
