"""The messages between the control plane and the data plane. Plain Python, so that they cross a process border cheaply.

The control plane knows requests, queues, blocks and priorities, and speaks of sequences by `key`. The data plane (an
`Executor`) keeps a copy of each sequence's tokens, appends what it samples, and knows nothing else of requests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from nanovllm.sampling_params import SamplingParams

# For one token position: token id -> (log-probability, rank from 1). The sampled token is always among the keys.
TokenLogprobs = Mapping[int, tuple[float, int]]


class Scheduled(NamedTuple):
    """The share of one sequence in one step. A tuple rather than a frozen dataclass: hundreds are made each step."""

    key: int  # names the sequence; never used again for another
    row: int  # its row of persistent device state, held from admission until it finishes or is preempted
    start: int  # position of the first token to compute; the KV of all earlier positions exists
    num_tokens: int  # how many tokens to compute, at least 1, guesses included
    sample: bool  # whether the last known token is among them, so that its logits choose the next one
    new_blocks: tuple[int, ...]  # the end of its block table that is new since its last plan; all of it at an admission
    # Guesses at what follows the last known token; each is verified by the logits before it. None (of a token) is left
    # to the data plane's draft model.
    guesses: tuple[int | None, ...] = ()


class Scored(NamedTuple):
    """Tokens of a prompt among those that a step computes. For each the log-probability of the prompt's next token is
    wanted, and of what the model would rather have had there. Each token is named once, whatever is computed again."""

    key: int  # of the sequence
    start: int  # position of the first of them
    end: int  # position after the last of them


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes: decodes first, then unfinished prompts, then newly admitted sequences.

    `freed_rows` comes before `scheduled`: the same plan may give a freed row to another sequence. A row in it may hold
    nothing: the very first plan names every row.
    """

    step: int
    scheduled: list[Scheduled]
    freed_rows: list[int] = field(default_factory=list)
    # Keys of those that sample by a mask: the step draws no token at all before `StepHandle.draw` brings the masks.
    masked: list[int] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)  # for `prompt_logprobs`


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled, for every `Scheduled` with `sample`: its new tokens, and log-probabilities if asked for.

    The new tokens are the accepted guesses and one more. The token -1 marks logits that were not finite.
    prompt_logprobs: for every `Scored` those of the prompt's tokens that follow, in order.
    """

    tokens: dict[int, tuple[list[int], list[TokenLogprobs] | None]]
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class StepMasks(NamedTuple):
    """Which tokens may come next, for sequences with structured outputs: after the last known token of each, and after
    each of its guesses. A key of `StepPlan.masked` may be missing: that sequence is over, and its token surplus."""

    keys: list[int]  # in the order of the plan
    number: int  # of masks
    # Called once, with an array [number, W] int32 of the data plane, W = ceil(vocab_size / 32). Writes the masks there:
    # bit i of word w allows token 32 * w + i.
    fill: Callable[[Any], None]


class StepHandle(Protocol):
    """A step that was submitted."""

    def guesses(self) -> dict[int, list[int]]:
        """The guesses behind each sequence that samples. Waits for the model, if a draft model makes them."""
        ...

    def draw(self, masks: StepMasks) -> None:
        """Draw the tokens of a step with masks, for which it has waited. Called once, before anything else is
        submitted. Meanwhile the device has been busy with the model."""
        ...

    def result(self) -> StepResult:
        """Wait for the step and return what it sampled. Called once, in the order of submission, or never."""
        ...


class Executor(Protocol):
    """The data plane as the engine sees it. Steps take effect in the order in which they are submitted."""

    def add(self, key: int, token_ids: Sequence[int], params: SamplingParams) -> None:
        """A new sequence: its prompt (to be copied) and its parameters, `seed` filled in. Told once: for a
        recomputation after a preemption the executor remembers what it sampled."""
        ...

    def remove(self, key: int) -> None:
        """The sequence is over. It may never have been added. What a step in flight samples for it is not used."""
        ...

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step without waiting for it. A row takes its last token from the step before, wherever that is."""
        ...

    def close(self) -> None:
        """Release everything; steps in flight are not collected any more. May be called twice."""
        ...
