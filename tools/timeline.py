"""From an engine's events to facts a picture can be drawn from: who computed what in which step, and who held which
block. Plain Python; pictures.py draws it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from stages.core import Event

Phase = Literal["prefill", "decode", "again", "waiting", "idle"]


@dataclass(frozen=True)
class Span:
    """One request in one step.

    prefill: prompt tokens for the first time; decode: one generated token; again: tokens that had been computed
    before; waiting: not admitted, or preempted; idle: admitted, but the step computes nothing for it.
    """

    step: int
    phase: Phase
    tokens: int = 0
    cached: int = 0  # tokens whose keys and values were there already
    hit: int = 0  # of these, the ones that the prefix cache had, where it was asked


@dataclass
class Life:
    """One request from `added` to `finished`. A second `generate` call starts new lives."""

    request: int
    prompt_tokens: int
    added: int  # the last step before it was added
    spans: list[Span] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)  # steps
    token_times: list[float] = field(default_factory=list)  # seconds, when each token was chosen
    finished: int | None = None  # step
    reason: str = ""
    computed: int = 0  # tokens that have ever been computed
    holds_seat: bool = False
    hit: int = 0  # what the prefix cache knew when it was admitted, until the first step after that
    table: list[int] = field(default_factory=list)


@dataclass
class Blocks:
    """Who holds which block while a step runs, and what lies in those that nobody holds."""

    step: int
    holders: dict[int, list[int]]  # block -> lives (indices), in order of arrival
    last: dict[int, int]  # block -> the life that filled it, for blocks that are free by now
    filled: dict[int, int]  # block -> tokens in it after the step, for blocks that are held; {} without a block size


@dataclass
class Timeline:
    lives: list[Life]
    steps: list[int]
    tokens_in_step: dict[int, int]
    blocks: list[Blocks]  # one a step, empty for engines without blocks


def read_events(events: Sequence[Event], block_size: int | None = None) -> Timeline:
    """Sort the events of one or several `generate` calls of one engine by request and step."""
    lives: list[Life] = []
    current: dict[int, int] = {}  # request -> index of its present life
    filler: dict[int, int] = {}  # block -> the life that took it fresh
    tokens_in_step: dict[int, int] = {}
    blocks: list[Blocks] = []
    step = 0
    # How things stand while the step runs. Before its end blocks may be freed, and between two steps taken.
    seated: set[int] = set()
    held: dict[int, list[int]] = {}
    filled_by: dict[int, int] = {}

    def close_step() -> None:
        for i, life in enumerate(lives):
            over = life.finished is not None and life.finished < step
            if not over and life.added < step and (not life.spans or life.spans[-1].step < step):
                life.spans.append(Span(step, "idle" if i in seated else "waiting"))
        if filled_by:
            blocks.append(snapshot(step, lives, held, filled_by, block_size))

    for event in events:
        kind, request = event["type"], event["request"]
        if kind == "scheduled" and event["step"] != step:
            if step:
                close_step()
            step = event["step"]
            seated = {i for i, life in enumerate(lives) if life.holds_seat}
            held = {i: list(life.table) for i, life in enumerate(lives) if life.table}
            filled_by = dict(filler)
        if kind == "added":
            current[request] = len(lives)
            lives.append(Life(request, event["prompt_tokens"], added=event["step"]))
            continue
        life = lives[current[request]]
        if kind == "admitted":
            life.holds_seat, life.hit = True, event["cached"]
        elif kind == "scheduled":
            tokens, cached = event["tokens"], event["cached"]
            tokens_in_step[step] = tokens_in_step.get(step, 0) + tokens
            phase: Phase = "prefill" if cached < life.prompt_tokens else "decode"
            life.spans.append(Span(step, "again" if cached < life.computed else phase, tokens, cached, life.hit))
            life.computed, life.hit = max(life.computed, cached + tokens), 0
        elif kind == "token":
            life.token_times += [event["t"]] * len(event["ids"])
        elif kind == "preempted":
            life.preempted.append(event["step"])
            life.holds_seat = False
        elif kind == "finished":
            life.finished, life.reason, life.holds_seat = event["step"], event["reason"], False
        elif kind == "blocks":
            # A sequence gives all its blocks back at once
            life.table = [] if event["freed"] else life.table + event["shared"] + event["taken"]
            filler |= dict.fromkeys(event["taken"], current[request])
    if step:
        close_step()
    return Timeline(lives, sorted(tokens_in_step), tokens_in_step, blocks)


def snapshot(
    step: int, lives: list[Life], held: dict[int, list[int]], filler: dict[int, int], block_size: int | None
) -> Blocks:
    holders: dict[int, list[int]] = {}
    filled: dict[int, int] = {}
    for index, table in held.items():
        span = next((s for s in reversed(lives[index].spans) if s.phase not in ("waiting", "idle")), None)
        length = span.cached + span.tokens if span else 0
        for i, block in enumerate(table):
            holders.setdefault(block, []).append(index)
            if block_size is not None:
                here = min(block_size, max(0, length - i * block_size))
                filled[block] = max(here, filled.get(block, 0))
    return Blocks(step, holders, {b: i for b, i in filler.items() if b not in holders}, filled)


def token_times(events: Sequence[Event]) -> list[tuple[int, float]]:
    """For each request the length of its prompt and the milliseconds from a token to the next, at their shortest.

    The shortest, since whatever else a machine does only ever makes it longer.
    """
    lives = [life for life in read_events(events).lives if len(life.token_times) > 1]
    gaps = [min(after - before for before, after in itertools.pairwise(life.token_times)) for life in lives]
    return [(life.prompt_tokens, 1000 * gap) for life, gap in zip(lives, gaps, strict=True)]


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
    timeline = read_events(events, block_size)
    if block_size is not None:
        return [SlotUse(b.step, len(b.holders) * block_size, sum(b.filled.values())) for b in timeline.blocks]
    assert reserved is not None
    return [SlotUse(step, reserved, sum(held_tokens(timeline, step).values())) for step in timeline.steps]


def held_tokens(timeline: Timeline, step: int) -> dict[int, int]:
    """Tokens stored while `step` runs, by life. With a known block size, a shared block counts for its first holder."""
    held: dict[int, int] = {}
    for blocks in timeline.blocks:
        if blocks.step == step and blocks.filled:
            for block, holders in blocks.holders.items():
                held[holders[0]] = held.get(holders[0], 0) + blocks.filled[block]
            return held
    for i, life in enumerate(timeline.lives):
        length = 0
        for span in itertools.takewhile(lambda s: s.step <= step, life.spans):
            if span.phase != "idle":
                length = span.cached + span.tokens  # nothing of one that waits
        if length and (life.finished is None or life.finished >= step):
            held[i] = length
    return held
