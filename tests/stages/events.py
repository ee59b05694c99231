"""The story that an engine tells in its events, checked for sense."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from stages.core import Event

TYPES = {"added", "admitted", "scheduled", "token", "preempted", "finished", "blocks"}


@dataclass
class Told:
    """What the events say of one request so far."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    admitted: bool = False
    finished: str | None = None
    preempted: int = 0
    steps_with_token: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)  # at each admission


class Listener:
    """Give it to an engine as `on_event`. It checks every event as it comes, the whole at `check_end`.

    One listener a call of `generate`: requests are numbered anew in each.
    `keeps_kv` is False for an engine that computes everything again in every step (stage 1).
    """

    def __init__(self, keeps_kv: bool = True) -> None:
        self.keeps_kv = keeps_kv
        self.events: list[Event] = []
        self.requests: dict[int, Told] = {}
        self.tables: dict[int, list[int]] = {}

    def __call__(self, event: Event) -> None:
        assert {"t", "step", "type", "request"} <= event.keys() and event["type"] in TYPES, event
        if self.events:
            assert event["t"] >= self.events[-1]["t"] and event["step"] >= self.events[-1]["step"], (
                "time runs backwards"
            )
        self.events.append(event)
        if event["type"] == "added":
            assert event["request"] not in self.requests, f"added twice: {event}"
            self.requests[event["request"]] = Told(event["prompt_tokens"])
        else:
            getattr(self, f"on_{event['type']}")(self.requests[event["request"]], event)

    def on_admitted(self, told: Told, event: Event) -> None:
        assert not told.admitted and told.finished is None, f"admitted again: {event}"
        assert event["cached"] < told.prompt_tokens + len(told.tokens), f"nothing is left to compute: {event}"
        told.admitted, told.computed = True, event["cached"]
        told.cached.append(event["cached"])

    def on_scheduled(self, told: Told, event: Event) -> None:
        assert told.admitted, f"scheduled before it was admitted: {event}"
        known = told.prompt_tokens + len(told.tokens)
        assert event["cached"] == (told.computed if self.keeps_kv else 0), f"{told.computed} are computed: {event}"
        assert event["tokens"] >= 1 and event["cached"] + event["tokens"] <= known, f"of {known} tokens: {event}"
        told.computed = event["cached"] + event["tokens"]

    def on_token(self, told: Told, event: Event) -> None:
        assert told.finished is None, f"a token after the end: {event}"
        assert told.computed == told.prompt_tokens + len(told.tokens), f"sampled before its time: {event}"
        told.tokens += event["ids"]
        told.steps_with_token.append(event["step"])

    def on_preempted(self, told: Told, event: Event) -> None:
        assert told.admitted and told.finished is None, event
        told.admitted, told.computed = False, 0
        told.preempted += 1

    def on_finished(self, told: Told, event: Event) -> None:
        assert told.finished is None and event["reason"] in ("stop", "length"), event
        told.finished = event["reason"]

    def on_blocks(self, told: Told, event: Event) -> None:
        table = self.tables.setdefault(event["request"], [])
        owners = Counter(block for blocks in self.tables.values() for block in set(blocks))
        new = event["taken"] + event["shared"]
        assert len(set(new + table)) == len(new + table), f"a block twice in one table: {event}"
        assert not [b for b in event["taken"] if owners[b]], f"taken, but in use: {event}"
        if new:
            assert not event["freed"], event
            assert not event["shared"] or not table, f"shared blocks can only be the first of a table: {event}"
            table += event["shared"] + event["taken"]
        else:
            assert sorted(event["freed"]) == sorted(b for b in table if owners[b] == 1), f"owners are {owners}: {event}"
            self.tables[event["request"]] = []

    def tokens_scheduled(self) -> int:
        return sum(e["tokens"] for e in self.events if e["type"] == "scheduled")

    def check_end(
        self, prompts: list[list[int]], outputs: list[list[int]], params: list[Any], eos: frozenset[int]
    ) -> None:
        """All requests came, ended and gave everything back, and the events carry exactly the outputs."""
        assert sorted(self.requests) == list(range(len(prompts)))
        for i, (told, output, p) in enumerate(zip(self.requests.values(), outputs, params, strict=True)):
            assert told.tokens == output and told.prompt_tokens == len(prompts[i]), f"request {i}"
            stopped = not p.ignore_eos and output[-1] in eos
            assert told.finished == ("stop" if stopped else "length"), f"request {i} {told.finished}"
            # The last token is never fed back, so all but it are computed, each exactly once unless preempted
            assert told.computed == len(prompts[i]) + len(output) - 1, f"request {i}"
        assert not any(self.tables.values()), f"still held: {self.tables}"
