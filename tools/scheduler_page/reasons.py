"""What the scheduler did in a tick, as sentences with reasons, which come from the events and the state behind them.

Each sentence has a kind: arrival, refused, start, preempted, forgotten, work, waits, end, error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

Said = tuple[str, str]  # kind and sentence


class Ask(NamedTuple):
    """For whom the scheduler looks for blocks among those of others, and maybe for a seat."""

    name: str
    needs: int  # blocks
    free: int
    seat: bool  # a waiting sequence asks; otherwise a running one


def listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Narrator:
    """Follows one run."""

    def __init__(self, setup: Any, rig: Any) -> None:
        self.setup, self.rig = setup, rig
        self.requests = {request.name: request for request in setup.requests}
        self.findable: set[int] = set()  # blocks whose content could be found before the latest event
        self.writers: dict[int, str] = {}  # of each block the one that took it last
        self.victims: set[str] = set()

    def arrival(self, request: Any) -> str:
        shared = f", the first {request.shared} of them the common beginning" if request.shared else ""
        priority = f", priority {request.priority}" if len({r.priority for r in self.setup.requests}) > 1 else ""
        return f"{request.name} arrives with {number(request.prompt, 'token')}{shared}{priority}."

    def hear(self, event: dict[str, Any]) -> Iterator[Said]:
        name, kind = event["request"], event["type"]
        if kind == "preempted":
            self.victims.add(name)
            yield "preempted", self.preemption(event)
        elif kind == "admitted":
            yield "start", self.start(name, event["cached"])
        elif kind == "blocks":
            yield from self.forgotten(name, event["taken"])
        elif kind == "finished":
            request = self.requests[name]
            yield "end", f"{name} has written its {number(request.output, 'token')} and leaves."
        self.findable = {block for block, content in enumerate(self.rig.blocks.contents) if content is not None}

    def asked(self, event: dict[str, Any]) -> Ask | None:
        """For whom the victim of this event is preempted: the engine tells, a stage is watched."""
        if "by" in event:
            name = event["by"][0]
            running = [self.rig.names[seq] for seq in self.rig.scheduler.running]
            return Ask(name, event["needs"], event["free"], seat=name not in running)
        if not self.rig.asks:
            return None
        name, needs = self.rig.asks[-1]
        return Ask(name, needs, len(self.rig.free), seat=False)

    def preemption(self, event: dict[str, Any]) -> str:
        victim, ask = event["request"], self.asked(event)
        running = [self.requests[self.rig.names[seq]] for seq in self.rig.scheduler.running]
        me = self.requests[victim]
        if all(r.priority == me.priority for r in running):
            last = f"{victim} came last"
        else:
            last = f"{victim} is last by priority ({me.priority})"
        if ask is None:
            return f"{victim} is preempted: {last}."
        free = "none is free" if not ask.free else f"only {ask.free} {'is' if ask.free == 1 else 'are'} free"
        if ask.name == victim:
            return f"{victim} is preempted: it needs {number(ask.needs, 'block')} more, {free}, and {last} itself."
        if ask.seat:
            what = f"{number(ask.needs, 'block')}, and {free}" if ask.needs > ask.free else "a seat, and all are taken"
            better = f"{self.requests[ask.name].priority} goes before {me.priority}"
            return f"{victim} is preempted: {ask.name} has the better priority ({better}) and needs {what}."
        return f"{victim} is preempted: {ask.name} needs {number(ask.needs, 'block')}, {free}, and {last}."

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
        spent = sum(tokens for _, tokens, *_ in shares.values())
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
            yield "waits", self.waits(waiting[0], self.rig.scheduler.waiting[0], self.setup.budget - spent, running)
        if len(waiting) > 1:
            behind = f"{listed(waiting[1:])} {'waits' if len(waiting) == 2 else 'wait'}"
            yield "waits", f"{behind} behind {waiting[0]}: nobody overtakes."
        if held:
            who = f"{listed(held)} {'waits' if len(held) == 1 else 'wait'}"
            yield "waits", f"{who} for the next batch: {listed(running + waiting)} must end first."

    def waits(self, name: str, seq: Any, budget: int, running: list[str]) -> str:
        blocks, total = self.rig.blocks, len(seq.token_ids)
        found = blocks.find_prefix(seq)
        needs = blocks.num_blocks_for(total) - sum(blocks.ref_counts[block] > 0 for block in found)
        free, worst = len(self.rig.free), max((self.requests[r].priority for r in running), default=0)
        if budget <= 0:
            return f"{name} waits: the budget of {self.setup.budget} tokens is spent."
        if len(running) >= self.setup.seats and worst <= self.requests[name].priority:
            return f"{name} waits: no seat is free."
        if needs > free:
            are = "is" if free == 1 else "are"
            room = f"{number(needs, 'block')} for its {number(total, 'token')}"
            return f"{name} waits: it needs {room}, and {free} {are} free."
        return f"{name} waits: its {total} tokens must fit the budget whole, and {budget} are left."
