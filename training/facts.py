"""What a story must not forget: its facts, how they are drawn, and whether a text kept them to the end.

Some combinations of facts are held out of the corpus: they make prompts that no model has seen.
"""

from __future__ import annotations

import random
import re
import tomllib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar


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


WORDS: Final = read_toml("words.toml")

NAMES: Final[dict[str, str]] = {  # name -> subject pronoun
    name: pronoun for pronoun, names in WORDS["names"].items() for name in names.split()
}
PRONOUNS: Final[dict[str, list[str]]] = WORDS["pronouns"]  # subject -> subject, object, possessive, reflexive
SPECIES: Final[list[str]] = WORDS["species"].split()
ADJECTIVES: Final[list[str]] = WORDS["adjectives"].split()
PLACES: Final[list[str]] = WORDS["places"].split()
SIZES: Final[list[str]] = WORDS["sizes"]
HOMES: Final[list[str]] = WORDS["homes"]
EMOJI: Final[list[str]] = WORDS["emoji"].split()
NOUNS: Final[dict[str, Thing]] = {row[0]: Thing(*row) for row in WORDS["objects"]}
MATERIALS: Final[dict[str, dict[str, str]]] = WORDS["materials"]  # material -> slot -> word

HELD_OUT_ONE_IN: Final = 50

_T = TypeVar("_T")
_NAMES: Final = tuple(NAMES)
_NOUNS: Final = tuple(NOUNS)
_SPECIES: Final = frozenset(SPECIES)
_ADJECTIVES: Final = frozenset(ADJECTIVES)
_WORD: Final = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Facts:
    name: str
    species: str
    friend: str
    friend_species: str
    adjective: str
    noun: str
    place: str

    @property
    def object(self) -> str:
        return f"{self.adjective} {self.noun}"


def is_held_out(facts: Facts) -> bool:
    """Whether the training corpus never has this combination: crc32 of "name|species|noun" is divisible by 50."""
    return zlib.crc32(f"{facts.name}|{facts.species}|{facts.noun}".encode()) % HELD_OUT_ONE_IN == 0


def pick(items: Sequence[_T], rng: random.Random) -> _T:
    """Like `rng.choice`, but several times faster and the same in every Python version."""
    return items[int(rng.random() * len(items))]


def draw_facts(rng: random.Random, held_out: bool) -> Facts:
    """Facts of two different friends of different species, from the corpus or from what is held out of the corpus."""
    while True:
        name, friend = pick(_NAMES, rng), pick(_NAMES, rng)
        species, friend_species = pick(SPECIES, rng), pick(SPECIES, rng)
        adjective, noun, place = pick(ADJECTIVES, rng), pick(_NOUNS, rng), pick(PLACES, rng)
        facts = Facts(name, species, friend, friend_species, adjective, noun, place)
        if name != friend and species != friend_species and is_held_out(facts) == held_out:
            return facts


def slot_values(facts: Facts, rng: random.Random) -> dict[str, str]:
    """The slots that stay the same through a story. Capitals: N(ame), S(pecies), F(riend), O(bject).

    Articles are plain "a" here. `template.write` makes an "an" of the article where one is due.
    """
    thing = NOUNS[facts.noun]
    he, him, his, himself = PRONOUNS[NAMES[facts.name]]
    friend_he, friend_him, friend_his, _ = PRONOUNS[NAMES[facts.friend]]
    values = {
        "N": facts.name,
        "S": facts.species,
        "a_S": f"a {facts.species}",
        "F": facts.friend,
        "FS": facts.friend_species,
        "a_FS": f"a {facts.friend_species}",
        "O": facts.object,
        "o": facts.noun,
        "a_O": f"a {pick(SIZES, rng)} {facts.object}",
        "a_plain_O": f"a {facts.object}",
        "adj": facts.adjective,
        "he": he,
        "him": him,
        "his": his,
        "himself": himself,
        "fhe": friend_he,
        "fhim": friend_him,
        "fhis": friend_his,
        "place": facts.place,
        "home": pick(HOMES, rng),
        "trait": thing.trait,
        "daily": thing.daily,
        **MATERIALS[thing.material],
    }
    values["signal"] = thing.signal.format_map(values)
    return values


def check_story(text: str, facts: Facts) -> list[str]:
    """What is wrong with a whole story, opening included, by the facts of its opening; [] if it kept them.

    Names, species and nouns of objects occur only in the roles of the protagonist, the friend and the object. Any other
    word of these lists is therefore an exchange. The last paragraph must still name all three.
    """
    words = _WORD.findall(text)
    problems = [*_strangers(words, facts), *_exchanges(words, facts)]
    last = text.rsplit("\n\n", 1)[-1]
    last_words = set(_WORD.findall(last))
    named = (facts.name, facts.friend)
    problems += [f"{name} is missing from the last paragraph" for name in named if name not in last_words]
    if facts.object not in last:
        problems.append(f"the {facts.object} is missing from the last paragraph")
    if not last.endswith((".", "!", "?", '"', *EMOJI)):
        problems.append("the story breaks off")
    return problems


def _strangers(words: list[str], facts: Facts) -> list[str]:
    """Reserved words that belong to nobody in this story."""
    known = {facts.name, facts.friend, facts.species, facts.friend_species, facts.noun}
    foreign = (word for word in words if word in NAMES or word in _SPECIES or word in NOUNS)
    return [f"{word} does not belong here" for word in dict.fromkeys(foreign) if word not in known]


def _exchanges(words: list[str], facts: Facts) -> list[str]:
    """Right words in a wrong pair: the friend's species for the protagonist, another colour for the object."""
    species_of = {facts.name: facts.species, facts.friend: facts.friend_species}
    problems = []
    for first, second, third in zip(words, words[1:], words[2:], strict=False):
        if first in species_of and second == "the" and third in _SPECIES and third != species_of[first]:
            problems.append(f"{first} has become {third}")
        if third == facts.noun and second in _ADJECTIVES and second != facts.adjective:
            problems.append(f"the {facts.object} has become {second}")
    return problems
