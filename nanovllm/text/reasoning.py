"""Separates a model's reasoning, which the model writes between <think> and </think>, from its answer.

Qwen3 writes both markers itself, unless its template has put an empty block into the prompt. The templates of
DeepSeek-R1's kind open the block in the prompt, so that the output begins with reasoning.
"""

from typing import Literal

from nanovllm.text.parts import Part, Splitter, unsettled

OPEN, CLOSE = "<think>", "</think>"
REASONING_PARSERS = "qwen3", "deepseek_r1"  # vLLM's names
# Where an output begins: before a block that may come, inside a block, or after it, in the answer.
Beginning = Literal["before", "inside", "after"]


def reasoning_parser(template: str) -> str | None:
    """The parser for models with this chat template; None if the template has no marker of reasoning."""
    return "qwen3" if OPEN in template or CLOSE in template else None


def beginning(parser: str, prompt_end: str) -> Beginning:
    """Where the output begins, as the end of the prompt tells.

    Only the very end counts: a <think> in a user's text is no marker. Models of DeepSeek-R1's kind begin with reasoning
    even if the prompt does not open the block.
    """
    end = prompt_end.rstrip()
    if end.endswith(CLOSE):
        return "after"
    return "inside" if end.endswith(OPEN) or parser == "deepseek_r1" else "before"


class ReasoningSplitter(Splitter):
    """Splits the reasoning of one output from its content.

    A block counts only at the beginning of the output. A block that is never closed is reasoning to the end. White
    space around a marker belongs to the marker.
    """

    def __init__(self, begins: Beginning) -> None:
        self._kind: Literal["content", "reasoning"] = "reasoning" if begins == "inside" else "content"
        self._state = self._content if begins == "after" else self._before
        self.passes = begins == "after"

    def finish(self) -> list[Part]:
        rest, self._unread = self._unread, ""
        blank = self._state == self._marked or (self._kind == "reasoning" and not rest.strip())
        return [] if blank or not rest else [Part(self._kind, rest)]

    def _before(self, parts: list[Part]) -> bool:
        """The block may begin here."""
        text = self._unread.lstrip()
        if len(text) < len(OPEN) and OPEN.startswith(text):
            return False
        if text.startswith(OPEN):
            self._kind, self._unread = "reasoning", text.removeprefix(OPEN)
        self._state = self._marked if self._kind == "reasoning" else self._content
        return True

    def _marked(self, parts: list[Part]) -> bool:
        """Behind a marker, where white space is dropped."""
        self._unread = self._unread.lstrip()
        if self._unread:
            self._state = self._inside if self._kind == "reasoning" else self._content
        return bool(self._unread)

    def _inside(self, parts: list[Part]) -> bool:
        reasoning, found, after = self._unread.partition(CLOSE)
        if found:
            parts.append(Part("reasoning", reasoning.rstrip()))
            self._kind, self._unread, self._state = "content", after, self._marked
            return True
        end = len(reasoning) - unsettled(reasoning, CLOSE)
        parts.append(Part("reasoning", reasoning[:end]))
        self._unread = reasoning[end:]
        return False

    def _content(self, parts: list[Part]) -> bool:
        parts.append(Part("content", self._unread))
        self._unread, self.passes = "", True
        return False
