"""Turns chat messages into a prompt by the template of the checkpoint, offline and in the server alike."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any, TypeAlias

from nanovllm.text.render import Renderer, TemplateSyntax, TemplateTooExpensive, TemplateTooSlow

logger = logging.getLogger(__name__)

# {"role": "user", "content": "..."}, or a list of text parts as content: [{"type": "text", "text": "..."}, ...].
# An assistant's message may have "tool_calls" as well, or in place of its content: [{"type": "function", "function":
# {"name": "...", "arguments": {...}}}, ...], with the arguments as an object or as JSON. The answer to a call is
# {"role": "tool", "content": "..."}.
Message: TypeAlias = Mapping[str, Any]
Tool: TypeAlias = Mapping[str, Any]  # {"type": "function", "function": {"name": "...", "parameters": JSON schema}}
PROBE = "nanovllmprobe"
PROBE_IN_DICT = re.compile(rf"""text\\?["']\s*:\s*\\?["']{PROBE}""")  # how a dict or JSON shows a part
PROBE_TOOL = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}
PROBE_CALL_ID = "probe0000"  # of nine characters, as Mistral's template wants them
PROBE_CALL = {"type": "function", "id": PROBE_CALL_ID, "function": {"name": "probe", "arguments": {}}}
SURROGATE = re.compile("[\ud800-\udfff]")
MAX_REASON = 500  # characters
# Variables that the engine sets, and arguments of `transformers`: a caller may set none of these.
RESERVED = frozenset(
    "conversation conversations messages tools documents chat_template add_generation_prompt continue_final_message "
    "tokenize padding truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs "
    "sanitize_control_tokens self".split()
)


class ChatTemplate:
    """What a template makes of messages.

    Some templates want a string as content, some walk over a list of parts, some take both. Content in the wrong form
    would be lost silently, or its dict would be printed into the prompt. So each role's form is found out: a
    message with a probe is rendered in both forms, to see which form brings the probe into the prompt. Where neither
    does, the template's syntax tree tells whether the template walks over a message's content.

    The forms of tool calls are found out likewise: whether arguments are an object, as `transformers` has them, or
    JSON, as OpenAI's clients send them; and what stands for the content of a message that has only calls.
    """

    def __init__(self, tokenizer: Any, renderer: Renderer | None = None) -> None:
        """`tokenizer` is one of `transformers`. `renderer`: for templates that are not trusted; without one, they are
        rendered here. Logs a warning if the template cannot be used: it has a syntax error, or goes beyond the bounds
        of the renderer."""
        from jinja2 import TemplateSyntaxError  # slow to import

        self._tokenizer, self._renderer = tokenizer, renderer
        self._unusable: str | None = None
        self.takes = cache(self._takes)
        self._form_of_calls = cache(self._find_form_of_calls)
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

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Tool] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt, up to the beginning of the model's answer; that too, unless `add_generation_prompt` is false.

        messages: may have earlier calls as "tool_calls", and their results as messages of the role "tool".
        tools: what the model may call, for the template to describe; a call is then a part of the model's text, in its
            own format. None and an empty list are the same.
        variables: what else the template may ask for.

        Raises ValueError if `messages` are not chat messages, if there is no template, if the template would leave out
        tools or calls, or if it refuses the messages, with the template's own reason. TemplateTooSlow is the ValueError
        of a renderer that is worth another try.
        """
        check_messages(messages)
        check_tools(tools or ())
        if not self._tokenizer.chat_template:
            raise ValueError("this model has no chat template, so it cannot chat; use generate or /v1/completions")
        if self._unusable is not None:
            raise ValueError(f"this model's chat template cannot be used: {self._unusable}")
        try:
            template = self._tokenizer.get_chat_template(tools=tools or None)
            for what, given in (("tools", bool(tools)), ("tool_calls", any(m.get("tool_calls") for m in messages))):
                if given and not re.search(rf"\b{what}\b", template):
                    raise ValueError(f"the template has no place for {what}, which would be lost; leave them out")
            prepared = [self._prepared(message, bool(tools)) for message in messages]
            text = self._apply(prepared, add_generation_prompt, tools, **variables)
        except TemplateTooSlow:
            raise
        except Exception as error:  # a template is a program
            reason = (str(error) or type(error).__name__)[:MAX_REASON]
            raise ValueError(f"the chat template refuses the messages: {reason}") from error
        if SURROGATE.search(text):
            raise ValueError("the messages, or what is given with them, have half a surrogate pair: no character")
        return text

    def _apply(
        self,
        messages: list[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Tool] | None = None,
        **variables: Any,
    ) -> str:
        """As `apply_chat_template` of `transformers`, which would leave out a content of None."""
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self._tokenizer.special_tokens_map, **variables}
        variables["chat_template"] = self._tokenizer.get_chat_template(tools=tools or None)
        variables |= {"add_generation_prompt": add_generation_prompt, "tools": list(tools) if tools else None}
        if self._renderer is not None:
            return self._renderer.render(messages, **variables)
        texts, _ = render_jinja_template([messages], **variables)
        return str(texts[0])

    def _prepared(self, message: Message, with_tools: bool) -> Message:
        """The message in a form that the template takes: the caller's form where possible."""
        said = {name: value for name, value in message.items() if value is not None}
        calls = said.pop("tool_calls", None)
        if calls:
            no_content, as_objects = self._form_of_calls(with_tools)
            said["tool_calls"] = [in_form(call, as_objects) for call in calls]
            if "content" not in said:
                return {**said, **no_content}
        content = said["content"]
        takes_string, takes_parts = self.takes(message["role"], with_tools)
        if takes_string if isinstance(content, str) else takes_parts:
            return said
        joined = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        return {**said, "content": joined if takes_string else as_parts(joined)}

    def _takes(self, role: str, with_tools: bool = False) -> tuple[bool, bool]:
        """Whether the template takes strings, and whether it takes lists of several parts, as content of this role. A
        template that takes neither looks at the first part only. `with_tools`: there may be another template for it."""
        parts = as_parts(PROBE) + as_parts(PROBE[::-1])
        for roles, place in conversations(role):
            found = self._brings(roles, place, PROBE, with_tools), self._brings(roles, place, parts, with_tools)
            if any(found) or self._brings(roles, place, parts[:1], with_tools):
                return found
        walks, asks = walks_over_content(self._tokenizer.get_chat_template(tools=[] if with_tools else None))
        return not walks or asks, walks

    def _brings(self, roles: Sequence[str], place: int, content: Any, with_tools: bool) -> bool:
        """Whether the content with the probe, of the message at `place`, arrives in the prompt as it should."""
        for other in "x", as_parts("x"):  # which form the other messages want may not be known yet
            messages: list[dict[str, Any]] = [{"role": role, "content": other} for role in roles]
            messages[place]["content"] = content
            if roles[place] == "tool":
                messages[place - 1] |= {"tool_calls": [in_form(PROBE_CALL, self._form_of_calls(with_tools)[1])]}
                messages[place] |= {"tool_call_id": PROBE_CALL_ID, "name": "probe"}
            text = self._try(messages, with_tools)
            if PROBE in text:
                words = [PROBE] if isinstance(content, str) else [part["text"] for part in content]
                return all(word in text for word in words) and not PROBE_IN_DICT.search(text)
        return False

    def _find_form_of_calls(self, with_tools: bool) -> tuple[Mapping[str, Any], bool]:
        """What stands for the content of a message that has only calls, and whether arguments are objects."""
        nothing: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}]  # first as `transformers` has it
        for no_content, as_objects, other in product(nothing, (True, False), ("x", as_parts("x"))):
            call = in_form(PROBE_CALL | {"function": {"name": "probe", "arguments": {PROBE: "x"}}}, as_objects)
            answer = {"role": "tool", "content": other, "tool_call_id": PROBE_CALL_ID, "name": "probe"}
            asked = {"role": "user", "content": other}
            text = self._try([asked, {"role": "assistant", **no_content, "tool_calls": [call]}, answer], with_tools)
            if PROBE in text and f"'{PROBE}'" not in text:  # which is how Python, and not JSON, shows an object
                return no_content, as_objects
        return {"content": ""}, True

    def _try(self, messages: list[dict[str, Any]], with_tools: bool) -> str:
        """The prompt; "" if the template does not take this conversation."""
        try:
            return self._apply(list(messages), tools=[PROBE_TOOL] if with_tools else None)
        except TemplateTooSlow:  # the same form may be found the next time
            raise
        except TemplateTooExpensive as error:
            self._unusable = str(error)
            raise
        except Exception:
            return ""


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raises ValueError for a name that is not an identifier, or is reserved (RESERVED)."""
    for name in variables:
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
            raise ValueError(f"{name!r:.100} is not a variable of a chat template that may be set; leave it out")


def check_messages(messages: Sequence[Message]) -> None:
    """Raises ValueError for what is not a conversation in text."""
    if not messages or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise ValueError(f"messages must be dicts with 'role' and 'content', one at least; got {messages!r}")
    for i, message in enumerate(messages):
        if not isinstance(message["role"], str):
            raise ValueError(f"messages[{i}]['role'] must be a string; got {message['role']!r}")
        calls, content = message.get("tool_calls"), message.get("content")
        if calls:
            check_calls(calls, message["role"], f"messages[{i}]['tool_calls']")
            if content is None:
                continue
        if "content" not in message:
            raise ValueError(f"messages[{i}] must have 'role' and 'content'; got {message!r}")
        parts = as_parts(content) if isinstance(content, str) else content
        if not isinstance(parts, list | tuple) or not all(is_text_part(part) for part in parts):
            raise ValueError(
                f"chat refuses the messages: messages[{i}]['content'] must be a string or a list of parts like "
                f"{{'type': 'text', 'text': '...'}}; got {content!r}"
            )
        if any(SURROGATE.search(part["text"]) for part in parts):
            raise ValueError(f"messages[{i}]['content'] has half a surrogate pair, which is no character")


def check_calls(calls: Any, role: str, place: str) -> None:
    """Raises ValueError for what is not a list of calls with their arguments."""
    if role != "assistant":
        raise ValueError(f"{place}: only an assistant calls tools; the role is {role!r}")
    if not isinstance(calls, list | tuple):
        raise ValueError(f"{place} must be a list of calls; got {calls!r}")
    for i, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{place}[{i}] must be like {{'type': 'function', 'function': {{'name': '...', 'arguments': {{...}}}}}}"
                f"; got {call!r}"
            )
        if arguments_of(function) is None:
            raise ValueError(
                f"{place}[{i}]: the arguments must be an object, as a dict or in JSON; got {function['arguments']!r}"
            )


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises ValueError for what is not a list of functions."""
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"tools[{i}] must be like {{'type': 'function', 'function': {{'name': '...', 'parameters': {{...}}}}}}"
                f"; got {tool!r}"
            )


def arguments_of(function: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call as an object. None if they are no object."""
    arguments = function.get("arguments") or {}  # OpenAI's clients send "" for none
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return dict(arguments) if isinstance(arguments, Mapping) else None


def in_form(call: Mapping[str, Any], as_object: bool) -> dict[str, Any]:
    """The call with its arguments as an object, or in JSON: as the caller wrote it, if the caller wrote JSON."""
    if "function" in call:
        return {**call, "function": in_form(call["function"], as_object)}
    given = call.get("arguments")
    if as_object:
        return {**call, "arguments": arguments_of(call)}
    return {**call, "arguments": given if given and isinstance(given, str) else json.dumps(given or {})}


def as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def num_characters(message: Message) -> int:
    content, calls = message.get("content") or "", message.get("tool_calls")
    length = len(content) if isinstance(content, str) else sum(len(part["text"]) + 1 for part in content)
    return length + (len(json.dumps(calls)) if calls else 0)


def conversations(role: str) -> list[tuple[list[str], int]]:
    """The roles of conversations to try, and the place of a message of this role in them. Templates differ in which
    conversations they take and which messages they look at; the longest that a template takes tells most."""
    if role == "system":
        return [(["system", "user", "assistant", "user"], 0), (["system", "user"], 0)]
    if role == "user":
        turns = ["user", "assistant", "user"]
        return [(["system", *turns], 3), (turns, 2), (["system", "user"], 1), (["user"], 0)]
    if role == "tool":
        return [(["user", "assistant", "tool"], 2)]
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
