"""A hand-made probabilistic grammar of little children's stories: the corpus of the embedded model and the test
prompts.

What is introduced in the opening (who, with which friend, which object, where) is needed again until the last
sentence, often hundreds of tokens later. A wrong block of a KV cache therefore shows in the text itself: the fox
changes its name. `check_story` tells whether a text kept its facts.

A story is an opening, a set-up, zero or more episodes, a climax and a closing, or an opening and a miniature. The
sentences stand in plots.toml and episodes.toml, the words in words.toml. Everything is drawn from the given generator:
the same seed gives the same story on every platform and Python version.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any, Final

from training.facts import Facts, check_story, draw_facts, is_held_out, pick, read_toml, slot_values
from training.template import Slots, Template, compile_passages, write

__all__ = ["PLOTS", "Facts", "Opening", "Story", "check_story", "generate_story", "is_held_out", "opening"]

MAX_WORDS: Final = 715  # under 1,000 tokens
MINIATURE_SHARE: Final = 0.14
PLACES_FOR_SPECIES: Final = r'(?:(?:^|[.!?"] ){0}(?= (?!the\b)[a-z])|(?:said|asked|called|cried|admitted) {0}(?=\.))'
EPISODE_COUNTS: Final = (0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 6, 7, 9, 11)
CODA_SHARE: Final = 0.4


@dataclass(frozen=True, slots=True)
class Opening:
    text: str
    facts: Facts


@dataclass(frozen=True, slots=True)
class Story:
    text: str
    facts: Facts
    plot: str


@dataclass(frozen=True, slots=True)
class Plot:
    """`middles` are the plot's own episodes, `shared` those that fit into it and into others."""

    name: str
    openings: list[Template]
    setups: list[Template]
    middles: list[Template]
    shared: list[Template]
    climaxes: list[Template]
    closings: list[Template]


_PASSAGES: Final = read_toml("episodes.toml")
_OPENINGS: Final = compile_passages(_PASSAGES["openings"])
_MINIATURES: Final = compile_passages(_PASSAGES["miniatures"])
_CODAS: Final = compile_passages(_PASSAGES["codas"])
_EPISODES: Final = {kind: compile_passages(text) for kind, text in _PASSAGES["episodes"].items()}


def _read_plot(entry: dict[str, Any]) -> Plot:
    return Plot(
        name=entry["name"],
        openings=compile_passages(entry["openings"]) if "openings" in entry else _OPENINGS,
        setups=compile_passages(entry["setups"]),
        middles=compile_passages(entry["middles"]),
        shared=[episode for kind, pool in _EPISODES.items() if kind not in entry["without"] for episode in pool],
        climaxes=compile_passages(entry["climaxes"]),
        closings=compile_passages(entry["closings"]),
    )


PLOTS: Final[list[Plot]] = [_read_plot(entry) for entry in read_toml("plots.toml")["plots"]]


def opening(rng: random.Random) -> Opening:
    """The first paragraph of a story whose facts are held out of the corpus: a test prompt. It tells all the facts."""
    while True:
        story = generate_story(rng, held_out=True)
        text, facts = story.text.split("\n\n", 1)[0], story.facts
        if all(fact in text for fact in (facts.name, facts.species, facts.friend, facts.friend_species, facts.noun)):
            return Opening(text, facts)


def generate_story(rng: random.Random, held_out: bool = False) -> Story:
    """A story with facts from the corpus, or, with `held_out`, from the combinations that the corpus never has."""
    facts = draw_facts(rng, held_out)
    slots = Slots(slot_values(facts, rng), rng.random)
    if rng.random() < MINIATURE_SHARE:
        templates = [pick(_OPENINGS, rng), pick(_MINIATURES, rng)]
        return Story("\n\n".join(write(template, slots, rng) for template in templates), facts, "miniature")

    plot = pick(PLOTS, rng)
    start = write(pick(plot.openings, rng), slots, rng)
    middle = [write(pick(plot.setups, rng), slots, rng)]
    ending = [write(pick(plot.climaxes, rng), slots, rng), write(pick(plot.closings, rng), slots, rng)]
    words = sum(len(paragraph.split()) for paragraph in [start, *middle, *ending])
    for template in _draw_episodes(plot, pick(EPISODE_COUNTS, rng), rng):
        paragraph = write(template, slots, rng)
        words += len(paragraph.split())
        if words > MAX_WORDS:
            break
        middle.append(paragraph)
    rest = [_with_species(paragraph, facts, rng) for paragraph in middle + ending]
    if rng.random() < CODA_SHARE:
        rest[-1] += " " + write(pick(_CODAS, rng), slots, rng)
    return Story("\n\n".join([start, *rest]), facts, plot.name)


def _with_species(paragraph: str, facts: Facts, rng: random.Random) -> str:
    """Now and then say again who is what: "Nell the mouse looked up", "said Nell the mouse"."""
    for name, species, share in ((facts.name, facts.species, 0.5), (facts.friend, facts.friend_species, 0.4)):
        if rng.random() < share and f"{name} the " not in paragraph:
            places = [m.end() for m in re.finditer(PLACES_FOR_SPECIES.format(name), paragraph)]
            if places:
                place = pick(places, rng)
                paragraph = f"{paragraph[:place]} the {species}{paragraph[place:]}"
    return paragraph


def _draw_episodes(plot: Plot, count: int, rng: random.Random) -> list[Template]:
    """Different episodes in random order; about every second one belongs to the plot, as long as it has any left."""
    own, shared = list(plot.middles), list(plot.shared)
    drawn: list[Template] = []
    for _ in range(count):
        pool = own if own and rng.random() < 0.5 else shared
        drawn.append(pool.pop(int(rng.random() * len(pool))))
    return drawn
