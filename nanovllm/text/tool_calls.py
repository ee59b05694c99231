"""Finds tool calls in a model's text while it arrives, in the format of the model's family.

A call is a JSON object: {"name": "get_weather", "arguments": {"city": "Oslo"}}. The formats (vLLM's `hermes` and
`llama3_json`) differ in what stands around this object. The arguments go out as they come, exactly as the model writes
them; as with OpenAI, a client must check them. Some models write the object as a JSON string: such a call goes out when
it is complete. Other keys of a call are dropped. Text that does not have the form of a call up to its arguments is
content, and no such text is lost. White space around a call belongs to the format.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from nanovllm.text.parts import Part, Splitter, unsettled

# The usual beginning of a call, up to its arguments. In any other order, a call is held back until it is complete.
HEAD = re.compile(
    r'\{ *(?:"type" *: *"function" *, *)?"name" *: *"([^"\\]+)" *, *"(?:arguments|parameters)" *: *(?=\{)'.replace(
        " *", r"[ \t\r\n]*"
    )
)
MAX_HEAD = 2048  # characters of a longer beginning are not looked for again with every piece of text
FIRST_KEY = re.compile(r'\{[ \t\r\n]*"([^"]*)"')
OTHER_KEY = re.compile(r',[ \t\r\n]*"')
KEYS = {"type", "name", "arguments", "parameters"}
CLOSES = {"{": "}", "[": "]"}
BETWEEN = frozenset(' \t\r\n,:+-.0123456789truefalsnE"{}[]')  # what JSON may have outside of its strings


@dataclass(frozen=True)
class ToolFormat:
    """How the models of a family write calls.

    begin, end:  what stands around each call.
    bare:        whether a call at the beginning of the output, or after another call, may do without `begin`.
    arguments:   the key of the arguments, where a grammar writes the call. Both keys are read.
    between:     what stands between two calls, where a grammar writes them.
    """

    name: str
    begin: str
    end: str
    bare: bool
    arguments: str
    between: str


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", False, "arguments", "\n")  # Hermes 2 Pro, Qwen2.5, Qwen3
LLAMA3_JSON = ToolFormat("llama3_json", "<|python_tag|>", "", True, "parameters", "; ")  # Llama 3.1 to 3.3
TOOL_FORMATS = {form.name: form for form in (HERMES, LLAMA3_JSON)}  # by vLLM's names


def tool_format(template: str) -> ToolFormat | None:
    """The format of calls that a chat template asks its model for; None if the format is not known here."""
    if HERMES.begin in template:
        # Models of other families use the same marker, but not around JSON.
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    asks = LLAMA3_JSON.begin in template or re.search(r'"name": function name, "parameters":', template)
    return LLAMA3_JSON if asks else None


class ToolCallSplitter(Splitter):
    """Splits the calls of one answer off from its content.

    one: only the first call counts, and later calls are dropped.
    """

    def __init__(self, form: ToolFormat, one: bool = False) -> None:
        self._form, self._one = form, one
        self._num_calls = 0
        self._state = self._first if form.bare else self._content
        self._held = ""  # of a call that has only begun: what stands before its JSON
        self._json = JsonObject()  # the object that is being read
        self._num_read = 0  # characters of the unread text that `_json` has read

    def feed(self, text: str) -> list[Part]:
        return [part for part in super().feed(text) if not (self._one and part.call)]  # the first has the number 0

    def finish(self) -> list[Part]:
        rest = self._held + self._unread
        unended = self._after_arguments, self._other_keys, self._after_object
        if self._state in unended or (self._num_calls and not rest.strip()):
            rest = ""  # of a call without its end
        self._held = self._unread = ""
        return [Part("content", rest)] if rest else []

    def _content(self, parts: list[Part]) -> bool:
        before, found, after = self._unread.partition(self._form.begin)
        if found:
            content = before.rstrip()
            parts.append(Part("content", content))
            self._begin(before[len(content) :] + found, after)
            return True
        end = len(before) - unsettled(before, self._form.begin)
        parts.append(Part("content", before[:end]))
        self._unread = before[end:]
        return False

    def _first(self, parts: list[Part]) -> bool:
        """At the beginning of the output, where a call may be bare."""
        text = self._unread.lstrip()
        if text.startswith("{"):
            self._begin(self._unread[: -len(text)], text)
        elif text:
            self._state = self._content
        return bool(text)

    def _next(self, parts: list[Part]) -> bool:
        """After a call."""
        text = self._unread = self._unread.lstrip()
        after = text[1:].lstrip() if self._form.bare and text[:1] in (";", ",") else text
        if self._form.bare and after.startswith("{"):
            self._begin(text[: -len(after)] if after != text else "", after)
        elif after:
            self._state = self._content
        return bool(after)

    def _begin(self, before: str, unread: str) -> None:
        self._held, self._unread, self._state = before, unread, self._head
        self._json, self._num_read = JsonObject(), 0

    def _head(self, parts: list[Part]) -> bool:
        """In a call, before its arguments."""
        if self._num_read == 0:
            text = self._unread.lstrip()
            self._held += self._unread[: len(self._unread) - len(text)]
            self._unread = text
        may_begin = self._num_read < MAX_HEAD
        if may_begin and (found := HEAD.match(self._unread, 0, MAX_HEAD)):
            self._call(parts, found[1])
            self._unread, self._json, self._state = self._unread[found.end() :], JsonObject(), self._arguments
            return True
        key = FIRST_KEY.match(self._unread, 0, MAX_HEAD) if may_begin else None
        if key is not None and key[1] not in KEYS:
            return self._is_content(parts, key.end())
        ended = self._json.feed(self._unread[self._num_read :])
        end, self._num_read = self._num_read, len(self._unread)
        if ended is None:
            return False
        end += ended[0]
        call = parsed(self._unread[:end]) if ended[1] else None
        if call is None:
            return self._is_content(parts, end)
        self._call(parts, call[0])
        parts.append(Part("arguments", call[1], self._num_calls - 1))
        self._unread, self._state = self._unread[end:], self._after_object
        return True

    def _call(self, parts: list[Part], name: str) -> None:
        parts.append(Part("call", name, self._num_calls))
        self._num_calls, self._held = self._num_calls + 1, ""

    def _is_content(self, parts: list[Part], end: int) -> bool:
        """No call has begun, as the first `end` characters have shown: they are content."""
        parts.append(Part("content", self._held + self._unread[:end]))
        self._held, self._unread, self._state = "", self._unread[end:], self._content
        return True

    def _arguments(self, parts: list[Part]) -> bool:
        ended = self._json.feed(self._unread)
        end = len(self._unread) if ended is None else ended[0]
        parts.append(Part("arguments", self._unread[:end], self._num_calls - 1))
        self._unread = self._unread[end:]
        if ended is not None:
            self._state = self._after_arguments
        return ended is not None

    def _after_arguments(self, parts: list[Part]) -> bool:
        """Before other keys or the last brace of a call. The call counts even if the model forgets the brace."""
        text = self._unread = self._unread.lstrip()
        if text.rstrip() in ("", ","):
            return False
        self._state = self._after_object
        if text.startswith("}") or OTHER_KEY.match(text):
            self._json, self._state = JsonObject(), self._other_keys
            self._json.feed("{")
        return True

    def _other_keys(self, parts: list[Part]) -> bool:
        """Up to the last brace of a call."""
        ended = self._json.feed(self._unread)
        self._unread = "" if ended is None else self._unread[ended[0] :]
        if ended is not None:
            self._state = self._after_object
        return ended is not None

    def _after_object(self, parts: list[Part]) -> bool:
        """Before the marker that ends a call. The call counts even if the model forgets the marker."""
        self._unread = self._unread.lstrip()
        if self._unread != self._form.end and self._form.end.startswith(self._unread):
            return False
        self._unread = self._unread.removeprefix(self._form.end)
        self._state = self._next
        return True


class JsonObject:
    """Finds the end of a JSON object that arrives in pieces, by its brackets and strings alone."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = self._is_escaped = False

    def feed(self, text: str) -> tuple[int, bool] | None:
        """Read the next piece. Returns the number of characters up to the end of the object, and True; or up to a
        character that no JSON object can have there, and False; or None if the piece has neither."""
        for i, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character not in BETWEEN or not (self._open or character == "{"):
                return i, False
            elif character == '"':
                self._in_string = True
            elif character in CLOSES:
                self._open.append(CLOSES[character])
            elif character in "}]":
                if self._open.pop() != character:
                    return i, False
                if not self._open:
                    return i + 1, True
        return None


def parsed(text: str) -> tuple[str, str] | None:
    """The name and the arguments (as JSON) of a complete call, whose keys may have any order; None if `text` is no
    call."""
    try:
        call: Any = json.loads(text, strict=False)
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            arguments = json.loads(arguments, strict=False)
        if not (isinstance(name, str) and name and isinstance(arguments, dict)):
            return None
        written = json.dumps(arguments, ensure_ascii=False)
        (name + written).encode()  # half a surrogate pair is no text
        return name, written
    except (ValueError, RecursionError):
        return None
