"""A hand-made probabilistic grammar of little children's stories: the corpus of the embedded model and the test
prompts.

What is introduced in the opening (who, with which friend, which object, where) is needed again until the last
sentence, often hundreds of tokens later. A wrong block of a KV cache therefore shows in the text itself: the fox
changes its name. `check_story` tells whether a text kept its facts.

A story is an opening, a set-up, zero or more episodes, a climax and a closing, or an opening and a miniature.
Everything is drawn from the given generator: the same seed gives the same story on every platform and Python version.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Final

from training.story_check import Verdict, check_story
from training.story_episodes import ANYWHERE, CARRIED, CODAS, LEISURELY, MINIATURES, OVERNIGHT, ROAD
from training.story_facts import Facts, draw_facts, is_held_out, pick, slot_values
from training.story_openings import NEW_FRIEND_OPENINGS, OPENINGS
from training.story_plot import Plot
from training.story_plots import PLOTS as PLOTS_A
from training.story_plots_more import NEW_FRIEND
from training.story_plots_more import PLOTS as PLOTS_B
from training.story_template import Slots, Template, write

__all__ = ["PLOTS", "Facts", "Opening", "Story", "Verdict", "check_story", "generate_story", "is_held_out", "opening"]

PLOTS: Final[tuple[Plot, ...]] = PLOTS_A + PLOTS_B
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
        templates, name = [pick(OPENINGS, rng), pick(MINIATURES, rng)], "miniature"
        return Story("\n\n".join(write(template, slots, rng) for template in templates), facts, name)

    plot = pick(PLOTS, rng)
    start = write(pick(NEW_FRIEND_OPENINGS if plot is NEW_FRIEND else OPENINGS, rng), slots, rng)
    paragraphs = [start, write(pick(plot.setups, rng), slots, rng)]
    ending = [write(pick(plot.climaxes, rng), slots, rng), write(pick(plot.closings, rng), slots, rng)]
    words = sum(len(paragraph.split()) for paragraph in paragraphs + ending)
    for template in _draw_episodes(plot, pick(EPISODE_COUNTS, rng), rng):
        paragraph = write(template, slots, rng)
        words += len(paragraph.split())
        if words > MAX_WORDS:
            break
        paragraphs.append(paragraph)
    paragraphs[1:] = [_with_species(paragraph, facts, rng) for paragraph in paragraphs[1:]]
    ending = [_with_species(paragraph, facts, rng) for paragraph in ending]
    if rng.random() < CODA_SHARE:
        ending[-1] += " " + write(pick(CODAS, rng), slots, rng)
    return Story("\n\n".join(paragraphs + ending), facts, plot.name)


def _with_species(paragraph: str, facts: Facts, rng: random.Random) -> str:
    """Now and then say again who is what: "Nell the mouse looked up", "said Nell the mouse"."""
    for name, species, share in ((facts.name, facts.species, 0.5), (facts.friend, facts.friend_species, 0.4)):
        if rng.random() < share and f"{name} the " not in paragraph:
            places = [m.end() for m in re.finditer(PLACES_FOR_SPECIES.format(name), paragraph)]
            if places:
                place = pick(places, rng)
                paragraph = f"{paragraph[:place]} the {species}{paragraph[place:]}"
    return paragraph


def _shared_episodes(plot: Plot) -> list[Template]:
    pools = [(True, ANYWHERE), (plot.carried, CARRIED), (plot.journey, ROAD), (plot.leisure, LEISURELY)]
    return [template for fits, pool in [*pools, (plot.overnight, OVERNIGHT)] if fits for template in pool]


_SHARED: Final[dict[str, list[Template]]] = {plot.name: _shared_episodes(plot) for plot in PLOTS}


def _draw_episodes(plot: Plot, count: int, rng: random.Random) -> list[Template]:
    """Different episodes in random order; about every second one belongs to the plot, as long as it has any left."""
    own, shared = list(plot.middles), list(_SHARED[plot.name])
    drawn: list[Template] = []
    for _ in range(count):
        pool = own if own and rng.random() < 0.5 else shared
        drawn.append(pool.pop(int(rng.random() * len(pool))))
    return drawn
