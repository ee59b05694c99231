"""What an answer consists of: content, reasoning and tool calls, told apart while the text arrives."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple


class Part(NamedTuple):
    """A piece of an answer.

    kind:  "call" begins a tool call, and `text` is the name of its function; "arguments" is a piece of its JSON.
    call:  the number of the tool call, from 0; None for content and reasoning.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call: int | None = None


class Splitter(ABC):
    """Takes text in pieces, and returns parts. The joined parts do not depend on how the text was cut into pieces.

    passes: whether all further text is content.

    A subclass has a method for each state, and `_state` is one of them. The method takes what it can from the unread
    text, and returns whether the state that follows should be asked at once.
    """

    passes = False
    _unread = ""
    _state: Callable[[list[Part]], bool]

    def feed(self, text: str) -> list[Part]:
        self._unread += text
        parts: list[Part] = []
        while self._state(parts):
            pass
        return parts

    @abstractmethod
    def finish(self) -> list[Part]:
        """The parts that were held back, when no more text will come."""


class Answer:
    """Splits one answer with several splitters: each gets the content that the splitter before has left."""

    def __init__(self, splitters: Sequence[Splitter]) -> None:
        self._splitters = splitters

    def feed(self, text: str, last: bool) -> list[Part]:
        """The parts that the next piece of text completes. `last`: there will be no other piece."""
        parts = [Part("content", text)] if text else []
        for splitter in self._splitters:
            if splitter.passes:
                continue
            found: list[Part] = []
            for part in parts:
                if part.kind == "content":
                    found += splitter.feed(part.text)
                else:
                    found.append(part)
            parts = found + splitter.finish() if last else found
        return joined(parts)


def joined(parts: Sequence[Part]) -> list[Part]:
    """The same parts, without empty parts, and with neighbours of one kind joined. Each call keeps its beginning."""
    found: list[Part] = []
    for part in parts:
        if found and part.kind != "call" and (found[-1].kind, found[-1].call) == (part.kind, part.call):
            found[-1] = Part(part.kind, found[-1].text + part.text, part.call)
        elif part.text:
            found.append(part)
    return found


def unsettled(text: str, marker: str) -> int:
    """How many characters at the end of a text may still turn out to belong to `marker`: a beginning of the marker,
    white space before the marker, or both.

    The text must not have the whole marker. The first character of the marker must not occur in it again.
    """
    begins = text.rfind(marker[0])
    end = begins if begins >= 0 and marker.startswith(text[begins:]) else len(text)
    return len(text) - len(text[:end].rstrip())
