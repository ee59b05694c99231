"""What a plot is made of.

Every closing names the protagonist, the friend and the object, because that is what a reader (and `story_check`)
looks for at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.story_template import Template


@dataclass(frozen=True, slots=True)
class Plot:
    """A set-up, some episodes of its own (to be mixed with those of `story_episodes`), a climax and a closing."""

    name: str
    setups: list[Template]
    middles: list[Template]
    climaxes: list[Template]
    closings: list[Template]
    carried: bool = True  # whether the protagonist has the object, whole, during the middle episodes
    journey: bool = True  # whether they travel
    leisure: bool = True  # whether there is time for games and inns
    overnight: bool = True  # whether a night may pass
