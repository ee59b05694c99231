"""Decide about fields that this server does not use: accept a value that changes nothing, refuse one that would.

A client library sends many fields with their defaults. If the server refused these, the client could not be used. If
the server ignored a field that changes the answer, the client would get a wrong answer without a warning.
"""

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

logger = logging.getLogger(__name__)

MOST_NAMES = 100  # field names in the log, in all: clients can invent any number of names
Json = dict[str, Any]
Harmless = Mapping[str, tuple[Any, ...]]  # by the name of a field: the values that change nothing

# These fields say nothing about the answer, whatever their value.
NO_MATTER = frozenset(
    "user store metadata service_tier parallel_tool_calls safety_identifier prompt_cache_key prompt_cache_retention "
    "prediction length_penalty early_stopping".split()
)
# Any other value of these fields would change the answer, and is refused. `None` is harmless in all of them.
HARMLESS: Harmless = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # without tools there is nothing to choose
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
    "detokenize": (True,),
    "return_tokens_as_token_ids": (False,),
    "logits_processors": ([],),
    "typical_p": (1,),
    "top_a": (0,),
    "mirostat": (0,),
    "repeat_penalty": (1,),
    "prompt_embeds": (),
    "max_new_tokens": (),
    "min_new_tokens": (),
    "n_predict": (),
    "num_return_sequences": (1,),
    "stop_sequences": ([],),
    "grammar": ("",),
    "regex": ("",),
    "json_schema": ({},),
    "system": (),
    "instructions": (),
    "enable_thinking": (),
    "extra_body": ({},),
}
# Names of other servers, and ours. Clients of several servers send both: that is harmless if the values are the same.
TWINS = {
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty",
}
REMEDIES = {
    "previous_response_id": "nothing is stored here, so send the whole conversation as input",
    "chat_template": "start the server with --chat-template",
    "repeat_penalty": "its name here is repetition_penalty",
    "functions": "send them as tools",
    "function_call": "use tool_choice, and tool_calls in messages",
    "response_format": "its name here is text.format",
    "schema": 'send {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}',
    "messages": "send them to /v1/chat/completions",
    "max_tokens": "its name here is max_output_tokens",
    "max_completion_tokens": "its name in /v1/completions is max_tokens, in /v1/responses max_output_tokens",
    "max_output_tokens": "its name here is max_tokens",
    "max_new_tokens": "its name in /v1/responses is max_output_tokens, otherwise max_tokens",
    "n_predict": "its name in /v1/responses is max_output_tokens, otherwise max_tokens",
    "min_new_tokens": "its name here is min_tokens",
    "num_return_sequences": "its name here is n",
    "stop_sequences": "its name here is stop",
    "grammar": "its name here is structured_outputs.grammar",
    "regex": "its name here is structured_outputs.regex",
    "json_schema": "send it in response_format, or as structured_outputs.json",
    "system": "send it as a message with the role system",
    "instructions": "send them as a message with the role system",
    "enable_thinking": "send it in chat_template_kwargs",
    "extra_body": "send what is in it beside the other fields, as clients in Python do",
    "images": "this server reads no images",
    "prefix": "send continue_final_message: true and add_generation_prompt: false beside messages",
    "partial": "send continue_final_message: true and add_generation_prompt: false beside messages",
} | {f"guided_{kind}": f"its name here is structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")}


def settle(data: Json, known: Collection[str], harmless: Harmless, no_matter: Collection[str]) -> Json:
    """The fields of an object from the client, without fields that are None or change nothing.

    known:  the names of the fields that the server uses.

    Raises an error that names the field if a field would change the answer, or if its name looks like a misspelled
    known name.
    """
    kept: Json = {}
    for name, value in data.items():
        if value is None or name in no_matter:
            continue
        if name not in known:
            if name in harmless:
                twin = data.get(TWINS[name]) if name in TWINS else None
                if not any(is_same(value, one) for one in (*harmless[name], twin)):
                    raise refused(name, refusal(name, harmless[name]))
                continue
            if near := nearest(name, known):
                raise refused(name[:100], f"there is no such field; did you mean {near}?")
        kept[name] = value
    return kept


def refused(field: str, what: str) -> PydanticCustomError:
    """An error for a validator to raise. `errors.bad_request` turns it into an answer that names the field, which is
    a client's word, and so may have half a surrogate pair."""
    shown = field.encode(errors="replace").decode()
    return PydanticCustomError("refused", "{what}", {"field": shown, "what": what})


def is_same(value: Any, other: Any) -> bool:
    """Whether two values are equal, and both or neither are bool: in JSON, 1 is not true."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def refusal(name: str, harmless: tuple[Any, ...]) -> str:
    allowed = " or ".join(map(json.dumps, harmless)) or "null"
    remedy = REMEDIES.get(name, f"leave it out, or send {allowed}")
    return f"would change the answer, and this value is not supported here; {remedy}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that differs by at most one letter; None if there is none. Case, dashes, underscores and blanks
    do not count."""
    plain = squeezed(name[:100])
    return next((one for one in known if len(one) > 3 and one_edit_at_most(plain, squeezed(one))), None)


def squeezed(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


def one_edit_at_most(a: str, b: str) -> bool:
    """Whether `a` is `b`, or `b` with one letter added, left out, replaced, or swapped with the next letter."""
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    a, b = a[same:], b[same:]
    return a == b or a[1:] == b or a == b[1:] or a[1:] == b[1:] or (a[1::-1] == b[:2] and a[2:] == b[2:])


class Unknown:
    """The fields that were ignored, each named once in the log."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def note(self, extra: Mapping[str, Any] | None, where: str = "") -> None:
        for name in extra or ():
            shown = f"{where}{name[:50]}"
            if shown not in self.names and len(self.names) < MOST_NAMES:
                self.names.add(shown)
                logger.info("the field %r is ignored, since this server does not use it; this is logged once", shown)
