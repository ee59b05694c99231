"""Grammars for chat answers: tool calls that must or may come, and reasoning before what has a grammar of its own.

The grammars are in llguidance's dialect of Lark. A call is written as `tool_calls` reads it, so a call that a grammar
has forced always parses.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.structured_outputs import StructuredOutputsParams
from nanovllm.text.grammars import lark_rules
from nanovllm.text.reasoning import CLOSE, OPEN, Beginning
from nanovllm.text.tool_calls import HERMES, ToolFormat

NEW_LINE = "\n"
NOTHING_MORE = {"anyOf", "allOf", "oneOf", "$ref", "patternProperties", "additionalProperties"}


@dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    parameters:  a JSON schema of its arguments.
    strict:      whether calls must match the schema even if the model is free to call or not.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False

    def schema(self) -> dict[str, Any]:
        """The schema as it is enforced: the arguments are an object, with the named properties only.

        A schema that may name properties in another way (NOTHING_MORE) is left as it is.
        """
        schema = {"type": "object", **self.parameters}
        if "properties" in schema and not schema.keys() & NOTHING_MORE:
            schema["additionalProperties"] = False
        return schema


@dataclass(frozen=True)
class AnswerGrammar:
    """Writes grammars for the answers of one model to one prompt.

    special:  ids of the special tokens, by text. In a grammar, a text never stands for a special token.
    begins:   where the output begins; None for a model without reasoning.
    """

    special: Mapping[str, int]
    begins: Beginning | None

    def of_calls(
        self,
        form: ToolFormat,
        tools: Sequence[Tool],
        required: bool,
        one: bool,
        otherwise: StructuredOutputsParams | None = None,
    ) -> StructuredOutputsParams:
        """The grammar of calls of these tools, or of only `one` call, which then ends the answer.

        Unless a call is `required`, the answer may also be what `otherwise` describes (in the form HERMES only). If
        `otherwise` is None, the answer may be any text without a call; in the form HERMES, text may then also stand
        before, between and after calls. Raises ValueError if `otherwise` cannot be translated, or the grammar is too
        long.
        """
        calls = "call" if one else f"call ({quoted(form.between)} call)*"
        begin, end = self._marker(form.begin, after=NEW_LINE), self._marker(form.end, before=NEW_LINE)
        rules = [
            f"call: {begin} function {end}" if form is HERMES else "call: function",
            "function: " + " | ".join(f"f{i}" for i in range(len(tools))),
        ]
        for i, tool in enumerate(tools):
            free = not (required or tool.strict)
            head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{form.arguments}": '
            schema = {"type": "object"} if free else tool.schema()
            rules.append(f'f{i}: {quoted(head)} {json_rule(schema)} "}}"')
        if required:
            answer = calls
        elif otherwise is not None:
            answer = f"{calls} | structured"
            rules.append(nested("structured", otherwise))
        elif form is HERMES:
            answer = "text_call | TEXT" if one else "text_call* TEXT"
            rules += self._call_in_text(form)
        else:
            answer = f"{self._marker(form.begin)}? {calls} | BARE"
            rules.append(r"BARE: /[^{](.|\n)*/")
        return self._behind_reasoning(answer, rules)

    def of_answer(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """The same structured outputs, but after the reasoning if the model may reason first."""
        if self.begins in (None, "after"):
            return params
        return self._behind_reasoning("answer", [nested("answer", params)])

    def _call_in_text(self, form: ToolFormat) -> list[str]:
        """Rules for text before a call, and for the call. The text ends as soon as the marker of a call is complete."""
        rest = rf'"\n" function {self._marker(form.end, before=NEW_LINE)}'
        text = r"TEXT: /(.|\n)*/"
        if form.begin in self.special:
            return [text, f"text_call: TEXT {self._marker(form.begin)} {rest}"]
        return [text, f"text_begin[lazy]: TEXT {quoted(form.begin)}", f"text_call: text_begin {rest}"]

    def _behind_reasoning(self, answer: str, rules: list[str]) -> StructuredOutputsParams:
        if self.begins in (None, "after"):
            return StructuredOutputsParams(grammar="\n".join([f"start: {answer}", *rules, ""]))
        if CLOSE in self.special:
            inside = rf"/(.|\n)*/ {self._marker(CLOSE)}"
        else:
            inside, rules = "reasoning", [*rules, rf"reasoning[suffix={quoted(CLOSE)}]: /(.|\n)*/"]
        may_open = f"{self._marker(OPEN)} " if self.begins == "before" else ""
        begin = [f"start: thought{'?' if may_open else ''} final", rf"thought: {may_open}{inside} /\n{{0,2}}/"]
        return StructuredOutputsParams(grammar="\n".join([*begin, f"final: {answer}", *rules, ""]))

    def _marker(self, text: str, before: str = "", after: str = "") -> str:
        if text not in self.special:
            return quoted(before + text + after)
        parts = quoted(before), f"<[{self.special[text]}]>", quoted(after)
        return " ".join(part for part in parts if part != '""')


def nested(name: str, params: StructuredOutputsParams) -> str:
    """A rule for what these structured outputs describe. Raises ValueError for a grammar that cannot be translated."""
    return f"{name}: %lark {{\n{lark_rules(params)}\n}}"


def json_rule(schema: Mapping[str, Any]) -> str:
    """A part of a rule: JSON on one line that matches the schema. References may point into the schema."""
    return f"%json {quoted({**schema, 'x-guidance': {'whitespace_pattern': ' ?'}})}"


def quoted(value: Any) -> str:
    """A part of a rule: a string, or any JSON. The client's text cannot be taken for one of Lark's directives."""
    return json.dumps(value).replace("%", r"\u0025")
