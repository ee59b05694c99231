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
BEFORE_ALL = -1  # a step before the first, which is number 1 in the stages and number 0 in nanovllm


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
    """One choice of one request from `added` to `finished`. A second `generate` call starts new lives."""

    request: int
    prompt_tokens: int
    added: int  # the last step before it was added; BEFORE_ALL if there was none
    spans: list[Span] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)  # steps
    token_times: list[float] = field(default_factory=list)  # seconds, when each token was chosen
    finished: int | None = None  # step
    reason: str = ""
    computed: int = 0  # tokens that have ever been computed
    holds_seat: bool = False
    hit: int = 0  # what the prefix cache knew when it was admitted, until the first step after that
    choice: int = 0


@dataclass
class Blocks:
    """Who holds which block while a step runs, and what lies in those that nobody holds."""

    step: int
    holders: dict[int, list[int]]  # block -> lives (indices), in order of arrival
    last: dict[int, int]  # block -> the life that filled it, for blocks that are free by now
    filled: dict[int, int]  # block -> tokens in it after the step, for blocks that are held; {} without a block size


class Tables:
    """Who holds which blocks, event by event.

    `freed` in an event is what nobody else holds. A sequence that ends or is preempted gives up the rest with it,
    whether the engine tells the freeing before that (nanovllm) or after (the stages); wrong guesses cost a running one
    no more than what is named.
    """

    def __init__(self) -> None:
        self.of: dict[int, list[int]] = {}  # life or request -> its block table; nobody with an empty one
        self.over: set[int] = set()
        self.freeing: int | None = None  # who freed blocks with the event before this one

    def hear(self, who: int, event: Event) -> None:
        kind = event["type"]
        if kind in ("preempted", "finished"):
            self.over.add(who)
            if self.freeing == who:
                self.of.pop(who, None)
        elif kind in ("added", "admitted"):
            self.over.discard(who)
        elif kind == "blocks":
            freed = set(event["freed"])
            table = [b for b in self.of.get(who, []) + event["shared"] + event["taken"] if b not in freed]
            self.of[who] = [] if freed and who in self.over else table
            if not self.of[who]:
                del self.of[who]
        self.freeing = who if kind == "blocks" and event["freed"] else None


@dataclass
class Timeline:
    lives: list[Life]
    steps: list[int]
    tokens_in_step: dict[int, int]
    blocks: list[Blocks]  # one a step, empty for engines without blocks


def read_events(events: Sequence[Event], block_size: int | None = None) -> Timeline:
    """Sort the events of one or several `generate` calls of one engine by request and step."""
    lives: list[Life] = []
    current: dict[tuple[int, int], int] = {}  # request, choice -> index of its present life
    filler: dict[int, int] = {}  # block -> the life that took it fresh
    tokens_in_step: dict[int, int] = {}
    blocks: list[Blocks] = []
    step = BEFORE_ALL
    tables = Tables()
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
        kind, who = event["type"], (event["request"], event.get("choice", 0))
        if kind == "scheduled" and event["step"] != step:
            if step != BEFORE_ALL:
                close_step()
            step = event["step"]
            seated = {i for i, life in enumerate(lives) if life.holds_seat}
            held = {i: list(tables.of[i]) for i in range(len(lives)) if i in tables.of}
            filled_by = dict(filler)
        if kind == "added":
            current[who] = len(lives)
            lives.append(Life(who[0], event["prompt_tokens"], added=step, choice=who[1]))
            continue
        life = lives[current[who]]
        tables.hear(current[who], event)
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
            filler |= dict.fromkeys(event["taken"], current[who])
    if step != BEFORE_ALL:
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
