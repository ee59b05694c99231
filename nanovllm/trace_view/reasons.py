"""Why a request waits, and why one was preempted, in sentences that follow from the events."""

from __future__ import annotations

from typing import Any

from nanovllm.trace_view.engine_state import EngineState, Event


def are_free(free: int) -> str:
    return "none is free" if not free else f"{free} {'is' if free == 1 else 'are'} free"


def blocks(count: int) -> str:
    return f"{count} block{'s' * (count != 1)}"


class Reasons:
    """Hears the events of a run, each after `state` has.

    about: what is known of the engine's limits, `num_blocks`, `block_size`, `max_num_seqs`, `max_num_batched_tokens`.
    A limit that is not known is never given as a reason.
    """

    def __init__(self, state: EngineState, about: dict[str, Any]) -> None:
        self.state, self.about = state, about
        self.known: list[int] = []  # tokens of each sequence, prompt and generated
        self.order: list[tuple[int, int]] = []  # of each sequence among those that wait: priority, arrival
        self.step = -1
        self.planned = 0  # tokens in this step
        self.victims: dict[int, str] = {}  # of this step, each with the reason

    def hear(self, event: Event, sequence: int) -> str:
        """Take in an event of that sequence. Returns why it was preempted, if this event says so."""
        kind = event["type"]
        if sequence == len(self.known):
            self.known.append(self.state.prompt_tokens[sequence])
            self.order.append((event.get("priority", 0), sequence))
        if kind == "token":
            self.known[sequence] += len(event["ids"])
        elif kind in ("scheduled", "preempted") and event["step"] != self.step:
            self.step, self.planned, self.victims = event["step"], 0, {}
        if kind == "scheduled":
            self.planned += event["tokens"]
        elif kind == "preempted":
            self.victims[sequence] = self.preemption(event, sequence)
            return self.victims[sequence]
        return ""

    def preemption(self, event: Event, sequence: int) -> str:
        names, who = self.state.labels(), event.get("by")
        by = next((i for i in reversed(range(len(names))) if list(self.state.names[i]) == who), None)
        if by is None:  # a stage does not tell, and a recording may have begun later
            return f"blocks ran out, and {names[sequence]} came last"
        needs, free = event["needs"], event["free"]
        what = f"{blocks(needs)}, {are_free(free)}" if needs > free else "a seat, and none is free"
        if by == sequence:
            return f"it needs {what}, and it is itself the last in order"
        last = "came last" if self.order[by][0] == self.order[sequence][0] else "is less urgent"
        return f"{names[by]} needs {what}, and {names[sequence]} {last}"

    def first_in_line(self) -> list[Any]:
        """Of those that wait while the step runs, the first with its reason, as far as it is planned; [] if none do."""
        waiting = [i for i, status in enumerate(self.state.status) if status == "waiting"]
        if not waiting:
            return []
        first = min(waiting, key=lambda i: self.order[i])
        return [first, self.why(first)]

    def why(self, sequence: int) -> str:
        if sequence in self.victims:
            return f"preempted in this step: {self.victims[sequence]}"
        if self.planned == self.about.get("max_num_batched_tokens"):
            return f"the step's budget of {self.planned} tokens is spent"
        if self.state.status.count("running") == self.about.get("max_num_seqs"):
            return f"all {self.about['max_num_seqs']} seats are taken"
        if {"block_size", "num_blocks"} <= self.about.keys():
            needs = -(-self.known[sequence] // self.about["block_size"])
            free = self.about["num_blocks"] - len(self.state.owners)
            if needs > free:
                return f"its {self.known[sequence]} tokens need {blocks(needs)}, {are_free(free)}"
        return "its turn has not come"
