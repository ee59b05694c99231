"""The word lists of the story grammar, as they stand in words.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final, NamedTuple


class Thing(NamedTuple):
    """A treasured object. words.toml says what the fields are."""

    noun: str
    material: str
    trait: str
    daily: str
    signal: str


def read_toml(name: str) -> dict[str, Any]:
    """The contents of a data file of this folder."""
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


_WORDS: Final = read_toml("words.toml")

NAMES: Final[dict[str, str]] = {  # name -> subject pronoun
    name: pronoun for pronoun, names in _WORDS["names"].items() for name in names.split()
}
PRONOUNS: Final[dict[str, list[str]]] = _WORDS["pronouns"]  # subject -> subject, object, possessive, reflexive
SPECIES: Final[list[str]] = _WORDS["species"].split()
ADJECTIVES: Final[list[str]] = _WORDS["adjectives"].split()
PLACES: Final[list[str]] = _WORDS["places"].split()
SIZES: Final[list[str]] = _WORDS["sizes"]
HOMES: Final[list[str]] = _WORDS["homes"]
EMOJI: Final[list[str]] = _WORDS["emoji"].split()
NOUNS: Final[dict[str, Thing]] = {row[0]: Thing(*row) for row in _WORDS["objects"]}
MATERIALS: Final[dict[str, dict[str, str]]] = _WORDS["materials"]  # material -> slot -> word
HELPERS: Final[list[list[str]]] = _WORDS["helpers"]  # indefinite form, definite form, subject pronoun
GREETINGS: Final[list[list[str]]] = _WORDS["greetings"]  # language, greeting, thanks
LISTS: Final[dict[str, list[str]]] = _WORDS["lists"] | {"emoji": EMOJI}  # slot -> words
