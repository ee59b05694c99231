"""The state of an engine, followed through its events alone: who waits, who runs, and who holds which KV block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

Event = dict[str, Any]
Status = Literal["waiting", "running", "finished"]
Phase = Literal["prefill", "decode", "again"]


class EngineState:
    """What is known of every sequence after the events heard so far, of the engine or of a stage.

    A sequence is one choice of one request, from `added` to `finished`. Sequences are numbered in the order in which
    they are added. A second `generate` call of a stage adds its request 0 again, and that is a new sequence.

    `freed` in an event names the blocks that nobody holds any more. A sequence that ends or is preempted lets go of all
    its blocks, also of those that others still hold. The engine tells `freed` before that (and nothing if others hold
    all of the blocks); a stage tells it afterwards. A sequence that goes on loses only what is named: blocks that were
    taken for wrong guesses, or that no window reaches any more.
    """

    def __init__(self) -> None:
        # One entry for each sequence.
        self.names: list[tuple[Any, int]] = []  # request, choice
        self.prompt_tokens: list[int] = []
        self.status: list[Status] = []
        self.computed: list[int] = []  # the most tokens that ever had keys and values
        self.phases: list[Phase] = []  # what the latest step with it computed: see `_schedule`
        # Block tables from both sides. Who holds nothing, and what nobody holds, has no entry.
        self.tables: dict[int, list[int]] = {}  # sequence -> its blocks, in order
        self.owners: dict[int, list[int]] = {}  # block -> the sequences that hold it
        self.writers: dict[int, int] = {}  # block -> the sequence that took it last to write it
        self.changed: set[int] = set()  # sequences whose tables the latest event changed
        self._numbers: dict[tuple[Any, int], int] = {}  # name -> the latest sequence of that name

    def hear(self, event: Event) -> int:
        """Take in the next event. Returns the number of its sequence."""
        kind, name = event["type"], (event["request"], event.get("choice", 0))
        if kind == "added" or name not in self._numbers:
            self._numbers[name] = len(self.names)
            self._add(name, event.get("prompt_tokens", 0))
        sequence = self._numbers[name]
        self.changed = set()
        if kind == "admitted":
            self.status[sequence] = "running"
        elif kind == "scheduled":
            self._schedule(sequence, event["tokens"], event["cached"])
        elif kind in ("preempted", "finished"):
            self.status[sequence] = "waiting" if kind == "preempted" else "finished"
            for block in list(self.tables.get(sequence, ())):
                self._drop(sequence, block)
        elif kind == "blocks":
            for block in event["freed"]:
                for owner in list(self.owners.get(block, ())):
                    self._drop(owner, block)
            self.changed.add(sequence)
            for block in event["shared"] + event["taken"]:
                self.tables.setdefault(sequence, []).append(block)
                self.owners.setdefault(block, []).append(sequence)
            self.writers |= dict.fromkeys(event["taken"], sequence)
        return sequence

    def _add(self, name: tuple[Any, int], prompt_tokens: int) -> None:
        self.names.append(name)
        self.prompt_tokens.append(prompt_tokens)
        self.status.append("waiting")
        self.computed.append(0)
        self.phases.append("prefill")

    def _schedule(self, sequence: int, tokens: int, cached: int) -> None:
        """prefill: prompt tokens for the first time; decode: a generated token; again: tokens once computed before."""
        first: Phase = "prefill" if cached < self.prompt_tokens[sequence] else "decode"
        self.phases[sequence] = "again" if cached < self.computed[sequence] else first
        self.computed[sequence] = max(self.computed[sequence], cached + tokens)

    def _drop(self, sequence: int, block: int) -> None:
        self.changed.add(sequence)
        for holding, key, value in ((self.tables, sequence, block), (self.owners, block, sequence)):
            holding[key].remove(value)
            if not holding[key]:
                del holding[key]

    def labels(self, words: Sequence[str] | None = None) -> list[str]:
        """What to call each sequence: by its request, or that request's word; "1.0" is choice 0 where some request has
        several, and a prime marks a number that an earlier `generate` call had given."""
        several = any(choice for _, choice in self.names)
        seen: dict[tuple[Any, int], int] = {}
        labels = []
        for request, choice in self.names:
            again = seen[request, choice] = seen.get((request, choice), -1) + 1
            labels.append((words[request] if words else str(request)) + f".{choice}" * several + "′" * again)
        return labels
