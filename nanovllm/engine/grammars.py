"""Structured outputs, as the control plane sees them: who follows an output through its grammar, and who fills masks.

`text/grammars.py` does both. The control plane has no arrays: masks are written to arrays of the data plane.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from nanovllm.structured_outputs import StructuredOutputsParams


class Matcher(Protocol):
    """Where one output is in its grammar. It belongs to a sequence for life, and sees committed tokens only: no guess,
    and nothing behind the end. So a preemption or a rejected guess means nothing to it."""

    def copy(self) -> "Matcher": ...

    def accept(self, token_id: int) -> str | None:
        """Go on by a token of the output. Returns what is wrong where the grammar cannot go on; nothing else may
        follow then."""
        ...

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, could come next."""
        ...


class Grammars(Protocol):
    def compile(self, params: StructuredOutputsParams) -> Matcher:
        """At the start of an output. Any thread may call this. Raises ValueError for what cannot be enforced."""
        ...

    def fill(self, wanted: Sequence[tuple[Any, Sequence[int]]], masks: Any) -> None:
        """wanted: matchers that `compile` or their `copy` has made, each with guesses. Writes to `masks` what may come
        next in each output, and after each of its guesses: see `StepMasks`. After a guess that is not possible,
        anything may come: such a guess is never accepted."""
        ...
