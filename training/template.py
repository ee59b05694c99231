"""The template language of the story grammar: `[one|another]` chooses, `{slot}` inserts.

Choices nest. An empty alternative makes a sentence optional. A capitalised slot (`{The_helper}`) capitalises what the
slot gives. Templates are split once, at import, into nested lists of literal strings and choices, so that writing a
passage is a walk over lists and one `str.format_map`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Final, TypeAlias

from training.facts import EMOJI, PRONOUNS, WORDS

LISTS: Final[dict[str, list[str]]] = WORDS["lists"] | {"emoji": EMOJI}  # slot -> words

Part: TypeAlias = "str | list[list[Part]]"  # a literal, or a choice of alternatives
Template: TypeAlias = list[Part]

# "a" before a word that begins with the sound of a vowel; no word of the lists begins with a vocalic u.
_A_BEFORE_VOWEL: Final = re.compile(r"\b([Aa])(?= (?!one\b|one-|once\b|eu)[aeioéÉAEIO]\w)")

# Slots that are drawn together: who helps also decides the pronoun.
_GROUPS: Final[dict[str, list[dict[str, str]]]] = {
    "helper": [
        dict(zip(("helper", "the_helper", "hhe", "hhim", "hhis"), (a, the, *PRONOUNS[who][:3]), strict=True))
        for a, the, who in WORDS["helpers"]
    ],
    "hello": [{"tongue": tongue, "hello": hello, "thanks": thanks} for tongue, hello, thanks in WORDS["greetings"]],
}
_GROUP_OF: Final[dict[str, str]] = {slot: group for group, rows in _GROUPS.items() for slot in rows[0]}


def compile_template(text: str) -> Template:
    """Split one passage; line breaks count as spaces. Raises ValueError on unbalanced brackets."""
    flat = " ".join(text.split())
    parts, end = _parse(flat, 0)
    if end != len(flat):
        raise ValueError(f"unbalanced ']' at {end} in template {flat!r}")
    return parts


def compile_passages(text: str) -> list[Template]:
    """Split a block of passages that are separated by blank lines."""
    return [compile_template(passage) for passage in text.strip().split("\n\n")]


def _parse(text: str, start: int) -> tuple[Template, int]:
    parts: Template = []
    position = literal = start
    while position < len(text) and text[position] not in "|]":
        if text[position] != "[":
            position += 1
            continue
        if literal < position:
            parts.append(text[literal:position])
        alternatives: list[Template] = []
        while text[position] != "]":
            alternative, position = _parse(text, position + 1)
            alternatives.append(alternative)
            if position >= len(text):
                raise ValueError(f"unclosed '[' in template {text!r}")
        parts.append(alternatives)
        position += 1
        literal = position
    if literal < position:
        parts.append(text[literal:position])
    return parts, position


class Slots(dict[str, str]):
    """The slot values of one story.

    A slot without a value is drawn from the word lists when first needed, and keeps its word for one passage. Within a
    story no word is drawn twice as long as a few tries find another one.
    """

    def __init__(self, fixed: dict[str, str], uniform: Callable[[], float]) -> None:
        super().__init__(fixed)
        self._uniform = uniform
        self._local: list[str] = []
        self._used: set[tuple[str, int]] = set()

    def __missing__(self, slot: str) -> str:
        if slot[0].isupper():
            value = self[slot[0].lower() + slot[1:]]
            self._keep(slot, value[0].upper() + value[1:])
        elif slot in _GROUP_OF:
            rows = _GROUPS[_GROUP_OF[slot]]
            for name, word in rows[self._draw(_GROUP_OF[slot], len(rows))].items():
                self._keep(name, word)
        else:
            kind = slot.rstrip("23")
            self._keep(slot, LISTS[kind][self._draw(kind, len(LISTS[kind]))])
        return self[slot]

    def _keep(self, slot: str, value: str) -> None:
        self[slot] = value
        self._local.append(slot)

    def _draw(self, kind: str, count: int) -> int:
        for _ in range(8):
            index = int(self._uniform() * count)
            if (kind, index) not in self._used:
                break
        self._used.add((kind, index))
        return index

    def forget_passage(self) -> None:
        for slot in self._local:
            del self[slot]
        self._local.clear()


def write(template: Template, slots: Slots, rng: random.Random) -> str:
    """One passage of text: every choice made, every slot filled, no double spaces, "an" before a vowel."""
    pieces: list[str] = []
    _choose(template, rng.random, pieces)
    text = "".join(pieces).format_map(slots)
    slots.forget_passage()
    while "  " in text:
        text = text.replace("  ", " ")
    return _A_BEFORE_VOWEL.sub(r"\1n", text.strip())


def _choose(template: Template, uniform: Callable[[], float], pieces: list[str]) -> None:
    for part in template:
        if isinstance(part, str):
            pieces.append(part)
        else:
            _choose(part[int(uniform() * len(part))], uniform, pieces)
