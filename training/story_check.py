"""The grammar's own judge: did a story keep its facts to the end?

The words of the reserved lists (names, species, object nouns) occur only in the roles of the protagonist, the friend
and the object. Any other word of these lists in a text is therefore an exchange, and the last paragraph must still
name all three.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from training.story_facts import Facts
from training.story_objects import NOUNS
from training.story_words import ADJECTIVES, EMOJI, NAMES, SPECIES

_WORD: Final = re.compile(r"\w+")
_NAMES: Final = frozenset(NAMES)
_SPECIES: Final = frozenset(SPECIES)
_NOUNS: Final = frozenset(NOUNS)
_ADJECTIVES: Final = frozenset(ADJECTIVES)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`problems` in words, in the order of the text; none if the story kept its facts."""

    problems: tuple[str, ...]

    @property
    def kept(self) -> bool:
        return not self.problems


def check_story(text: str, facts: Facts) -> Verdict:
    """Judge a whole story, opening included, by the facts of its opening."""
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
    return Verdict(tuple(problems))


def _strangers(words: list[str], facts: Facts) -> list[str]:
    """Reserved words that belong to nobody in this story."""
    known = {facts.name, facts.friend, facts.species, facts.friend_species, facts.noun}
    foreign = (word for word in words if word in _NAMES or word in _SPECIES or word in _NOUNS)
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
