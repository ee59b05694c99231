"""What a story must not forget: its facts, how they are drawn, and which combinations are held out of the corpus."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from training.story_objects import NOUNS
from training.story_words import ADJECTIVES, HOMES, NAMES, PLACES, PRONOUNS, SIZES, SPECIES

HELD_OUT_ONE_IN: Final = 50

_T = TypeVar("_T")
_NAMES: Final = tuple(NAMES)
_NOUNS: Final = tuple(NOUNS)


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
    """The rule: crc32 of "name|species|noun" (UTF-8) divisible by 50. Such a combination is never in the training
    corpus.
    """
    return zlib.crc32(f"{facts.name}|{facts.species}|{facts.noun}".encode()) % HELD_OUT_ONE_IN == 0


def pick(items: Sequence[_T], rng: random.Random) -> _T:
    """Like `rng.choice`, but several times faster and the same in every Python version."""
    return items[int(rng.random() * len(items))]


def draw_facts(rng: random.Random, held_out: bool) -> Facts:
    while True:
        name, friend = pick(_NAMES, rng), pick(_NAMES, rng)
        species, friend_species = pick(SPECIES, rng), pick(SPECIES, rng)
        adjective, noun, place = pick(ADJECTIVES, rng), pick(_NOUNS, rng), pick(PLACES, rng)
        facts = Facts(name, species, friend, friend_species, adjective, noun, place)
        if name != friend and species != friend_species and is_held_out(facts) == held_out:
            return facts


def slot_values(facts: Facts, rng: random.Random) -> dict[str, str]:
    """The slots that stay the same through a story. Capitals: N(ame), S(pecies), F(riend), O(bject).

    Articles are plain "a" here; `story_template.write` makes an "an" of it where one is due.
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
        "broke": "tore" if thing.soft else "cracked",
        "crack": "a long tear" if thing.soft else "a long crack",
        "glue": "a needle and strong thread" if thing.soft else "a little pot of glue",
        "mend": "stitch" if thing.soft else "glue",
        "mended": "stitched" if thing.soft else "glued",
    }
    values["signal"] = thing.signal.format_map(values)
    return values
