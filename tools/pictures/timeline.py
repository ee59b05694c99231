"""From an engine's events to what a picture needs: who computed what in which step, and who held which block.

Plain Python, without drawing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from nanovllm.trace_view.engine_state import EngineState, Phase
from stages.core import Event

BEFORE_ALL = -1  # a step before the first, which is number 1 in the stages and number 0 in nanovllm


@dataclass(frozen=True)
class Span:
    """One sequence in one step.

    prefill: prompt tokens for the first time; decode: generated tokens; again: tokens that had been computed before;
    waiting: not admitted, or preempted; idle: admitted, but the step computes nothing for it.
    """

    step: int
    phase: Phase | Literal["waiting", "idle"]
    tokens: int = 0
    cached: int = 0  # tokens whose keys and values were there already
    hit: int = 0  # of these, the ones that the prefix cache had, where it was asked


@dataclass
class Life:
    """One sequence from `added` to `finished`: one choice of one request of one `generate` call."""

    request: int
    choice: int
    prompt_tokens: int
    added: int  # the last step before it was added; BEFORE_ALL if there was none
    spans: list[Span] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)  # steps
    token_times: list[float] = field(default_factory=list)  # seconds, when each token was chosen
    finished: int | None = None  # step
    length: int = 0  # tokens with keys and values when its latest step is over
    hit: int = 0  # what the prefix cache knew when it was admitted, until the first step after that


@dataclass(frozen=True)
class Blocks:
    """Who holds which block while a step runs, and what lies in those that nobody holds. Lives are indices."""

    step: int
    tables: dict[int, list[int]]  # life -> its blocks, in the order in which the lives came to hold some
    lengths: dict[int, int]  # life -> tokens in its blocks after the step
    writers: dict[int, int]  # block -> the life that wrote it last

    @property
    def holders(self) -> dict[int, list[int]]:
        """block -> the lives that hold it, in order of arrival"""
        holders: dict[int, list[int]] = {}
        for life in sorted(self.tables):
            for block in self.tables[life]:
                holders.setdefault(block, []).append(life)
        return holders

    def filled(self, block_size: int) -> dict[int, int]:
        """block -> tokens in it after the step, for blocks that are held"""
        filled: dict[int, int] = {}
        for life, table in self.tables.items():
            for i, block in enumerate(table):
                here = min(block_size, max(0, self.lengths[life] - i * block_size))
                filled[block] = max(here, filled.get(block, 0))
        return filled


@dataclass(frozen=True)
class Timeline:
    lives: list[Life]
    steps: list[int]
    tokens_in_step: dict[int, int]
    blocks: list[Blocks]  # one per step, empty for engines without blocks
    state: EngineState  # after the last event


def read_events(events: Sequence[Event]) -> Timeline:
    """Sort the events of one or several `generate` calls of one engine by sequence and step."""
    state = EngineState()
    lives: list[Life] = []
    tokens_in_step: dict[int, int] = {}
    blocks: list[Blocks] = []
    step = BEFORE_ALL
    # How things stand while the step runs. Before its end blocks may be freed, and between two steps taken.
    seated: set[int] = set()
    tables: dict[int, list[int]] = {}
    writers: dict[int, int] = {}

    def close_step() -> None:
        for i, life in enumerate(lives):
            over = life.finished is not None and life.finished < step
            if not over and life.added < step and (not life.spans or life.spans[-1].step < step):
                life.spans.append(Span(step, "idle" if i in seated else "waiting"))
        if writers:
            blocks.append(Blocks(step, tables, {i: lives[i].length for i in tables}, writers))

    for event in events:
        kind = event["type"]
        if kind == "scheduled" and event["step"] != step:
            if step != BEFORE_ALL:
                close_step()
            step = event["step"]
            seated = {i for i, status in enumerate(state.status) if status == "running"}
            tables = {i: list(table) for i, table in state.tables.items()}
            writers = dict(state.writers)
        index = state.hear(event)
        if index == len(lives):
            lives.append(Life(*state.names[index], state.prompt_tokens[index], added=step))
        life = lives[index]
        if kind == "admitted":
            life.hit = event["cached"]
        elif kind == "scheduled":
            tokens, cached = event["tokens"], event["cached"]
            tokens_in_step[step] = tokens_in_step.get(step, 0) + tokens
            life.spans.append(Span(step, state.phases[index], tokens, cached, life.hit))
            life.length, life.hit = cached + tokens, 0
        elif kind == "token":
            life.token_times += [event["t"]] * len(event["ids"])
        elif kind == "preempted":
            life.preempted.append(event["step"])
        elif kind == "finished":
            life.finished = event["step"]
    if step != BEFORE_ALL:
        close_step()
    return Timeline(lives, sorted(tokens_in_step), tokens_in_step, blocks, state)


def token_times(events: Sequence[Event]) -> list[tuple[int, float]]:
    """For each request the length of its prompt, and the shortest time between two of its tokens in milliseconds.

    The shortest, because everything else that a machine does can only make it longer.
    """
    gaps = ((life, [b - a for a, b in itertools.pairwise(life.token_times)]) for life in read_events(events).lives)
    return [(life.prompt_tokens, 1000 * min(between)) for life, between in gaps if between]


@dataclass(frozen=True)
class SlotUse:
    """KV memory in one step, in slots (one slot = keys and values of one token in every layer)."""

    step: int
    reserved: int
    used: int


def slot_use(events: Sequence[Event], *, block_size: int | None = None, reserved: int | None = None) -> list[SlotUse]:
    """How many slots were set aside and how many held a token, step by step.

    With blocks, give `block_size`: what is set aside follows from the events. Stage 2's rectangle is not in the events:
    give its rows x columns as `reserved`.
    """
    if (block_size is None) == (reserved is None):
        raise ValueError("give either block_size (stages 3 and up) or reserved (stage 2)")
    timeline = read_events(events)
    if block_size is not None:
        filled = [(blocks.step, blocks.filled(block_size)) for blocks in timeline.blocks]
        return [SlotUse(step, len(tokens) * block_size, sum(tokens.values())) for step, tokens in filled]
    assert reserved is not None
    return [SlotUse(step, reserved, sum(held_tokens(timeline, step).values())) for step in timeline.steps]


def held_tokens(timeline: Timeline, step: int) -> dict[int, int]:
    """Tokens stored while `step` runs, by life; of blocks that are shared, for each of their holders."""
    held: dict[int, int] = {}
    for i, life in enumerate(timeline.lives):
        length = 0
        for span in itertools.takewhile(lambda s: s.step <= step, life.spans):
            if span.phase != "idle":
                length = span.cached + span.tokens  # nothing of one that waits
        if length and (life.finished is None or life.finished >= step):
            held[i] = length
    return held
