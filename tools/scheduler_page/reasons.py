"""What the scheduler did in a tick, as sentences with reasons, which come from the events and the state behind them.

Each sentence has a kind: arrival, refused, start, preempted, forgotten, work, waits, end, error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from nanovllm.trace_view.engine_state import EngineState, Event
from nanovllm.trace_view.reasons import Reasons

Said = tuple[str, str]  # kind and sentence


def listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Narrator:
    """Follows one run."""

    def __init__(self, setup: Any, rig: Any, state: EngineState) -> None:
        self.setup, self.rig = setup, rig
        limits = {"num_blocks": setup.num_blocks, "block_size": setup.block_size, "max_num_seqs": setup.seats}
        limits |= {"max_num_batched_tokens": setup.budget, "enable_chunked_prefill": setup.chunks}
        self.reasons = Reasons(state, limits)
        self.requests = {request.name: request for request in setup.requests}
        self.findable: set[int] = set()  # blocks whose content could be found before the latest event
        self.writers: dict[int, str] = {}  # of each block the one that took it last
        self.victims: set[str] = set()

    def arrival(self, request: Any) -> str:
        shared = f", the first {request.shared} of them the common beginning" if request.shared else ""
        priority = f", priority {request.priority}" if len({r.priority for r in self.setup.requests}) > 1 else ""
        return f"{request.name} arrives with {number(request.prompt, 'token')}{shared}{priority}."

    def hear(self, event: Event, sequence: int) -> Iterator[Said]:
        """Take in an event of that sequence, after the state has."""
        name, kind = event["request"], event["type"]
        why = self.reasons.hear(event, sequence)
        if kind == "preempted":
            self.victims.add(name)
            yield "preempted", f"{name} is preempted: {why}."
        elif kind == "admitted":
            yield "start", self.start(name, event["cached"])
        elif kind == "blocks":
            yield from self.forgotten(name, event["taken"])
        elif kind == "finished":
            request = self.requests[name]
            yield "end", f"{name} has written its {number(request.output, 'token')} and leaves."
        self.findable = {block for block, content in enumerate(self.rig.blocks.contents) if content is not None}

    def start(self, name: str, cached: int) -> str:
        seq = next(seq for seq, known in self.rig.names.items() if known == name)
        again = "comes back" if name in self.victims else "starts"
        blocks = self.rig.blocks.num_blocks_for(len(seq.token_ids))
        found = f", {cached} of which the prefix cache already has" if cached else ""
        room = f"{number(blocks, 'block')} can hold its {number(len(seq.token_ids), 'token')}"
        return f"{name} {again}: a seat is free, and {room}{found}."

    def forgotten(self, name: str, taken: Iterable[int]) -> Iterator[Said]:
        lost: dict[str, list[str]] = {}
        for block in taken:
            if block in self.findable:
                lost.setdefault(self.writers[block], []).append(str(block))
            self.writers[block] = name
        for writer, blocks in lost.items():
            which = f"block{'s' if len(blocks) > 1 else ''} {listed(blocks)}"
            yield "forgotten", f"{name} takes {which}, first in the free list: text of {writer} is lost."

    def plan(self, shares: dict[str, list[Any]], held: list[str]) -> Iterator[Said]:
        """What the step computes, and why the others compute nothing."""
        known = {self.rig.names[seq]: seq for seq in self.rig.names}
        decodes = [name for name, (phase, *_) in shares.items() if phase == "decode"]
        if decodes:
            each = "decodes one token" if len(decodes) == 1 else "decode one token each"
            yield "work", f"{listed(decodes)} {each}."
        for name, (phase, tokens, cached, lost) in shares.items():
            if phase == "decode":
                continue
            end, total = cached + tokens, len(known[name].token_ids)
            span = f"token {end}" if tokens == 1 else f"tokens {cached + 1} to {end}"
            again = f" ({lost} of them again, lost by its preemption)" if lost else ""
            rest = "" if end == total else f": the budget of {self.setup.budget} has no room for more"
            yield "work", f"{name} computes {span} of {total}{again}{rest}."
        running = [self.rig.names[seq] for seq in self.rig.scheduler.running]
        if idle := [name for name in running if name not in shares]:
            verb = "computes" if len(idle) == 1 else "compute"
            yield "waits", f"{listed(idle)} {verb} nothing: the budget of {self.setup.budget} tokens is spent."
        waiting = [self.rig.names[seq] for seq in self.rig.scheduler.waiting]
        if waiting:
            yield "waits", self.waits(waiting[0], self.rig.scheduler.waiting[0])
        if len(waiting) > 1:
            behind = f"{listed(waiting[1:])} {'waits' if len(waiting) == 2 else 'wait'}"
            yield "waits", f"{behind} behind {waiting[0]}: nobody overtakes."
        if held:
            who = f"{listed(held)} {'waits' if len(held) == 1 else 'wait'}"
            yield "waits", f"{who} for the next batch: {listed(running + waiting)} must end first."

    def waits(self, name: str, seq: Any) -> str:
        i = next(i for i, (known, _) in enumerate(self.reasons.state.names) if known == name)
        if i in self.reasons.victims:
            return f"{name} waits: what it gave up in this step is not taken back at once."
        found = self.rig.blocks.find_prefix(seq)
        shared = sum(self.rig.blocks.ref_counts[block] > 0 for block in found)
        return f"{name} waits: {self.reasons.why(i, shared)}."
