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

    about: what is known of the engine's limits, `num_blocks`, `block_size`, `max_num_seqs`, `max_num_batched_tokens`,
    and of `enable_chunked_prefill`. A limit that is not known is never given as a reason.
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
        running = [i for i, status in enumerate(self.state.status) if status == "running"]
        last = max(running, key=lambda i: self.order[i], default=sequence)
        if self.order[last] > self.order[sequence]:  # the scheduler is a reader's
            return f"{names[by]} needs {what}, and {names[sequence]} was chosen, though {names[last]} is behind it"
        if by == sequence:
            return f"it needs {what}, and it is itself the last in order"
        better, worse = self.order[by][0], self.order[sequence][0]
        why = "came last" if better == worse else f"is less urgent (priority {worse}, not {better})"
        return f"{names[by]} needs {what}, and {names[sequence]} {why}"

    def first_in_line(self) -> list[Any]:
        """Of those that wait while the step runs, the first with its reason, as far as it is planned; [] if none do."""
        waiting = [i for i, status in enumerate(self.state.status) if status == "waiting"]
        if not waiting:
            return []
        first = min(waiting, key=lambda i: self.order[i])
        return [first, self.why(first)]

    def why(self, sequence: int, shared: int = 0) -> str:
        """Why a sequence waits while the step runs.

        shared: how many blocks others hold that hold its beginning. Events do not tell, so a recording counts none.
        """
        about, known = self.about, self.known[sequence]
        running = [self.order[i][0] for i, status in enumerate(self.state.status) if status == "running"]
        if sequence in self.victims:
            return f"preempted in this step: {self.victims[sequence]}"
        if self.planned == about.get("max_num_batched_tokens"):
            return f"the step's budget of {self.planned} tokens is spent"
        if len(running) == about.get("max_num_seqs") and max(running) <= self.order[sequence][0]:
            return f"all {len(running)} seats are taken" if len(running) > 1 else "the only seat is taken"
        if {"block_size", "num_blocks"} <= about.keys():
            needs = -(-known // about["block_size"]) - shared
            free = about["num_blocks"] - len(self.state.owners)
            if needs > free:
                beside = f" beside {shared} that it shares" if shared else ""
                return f"its {known} tokens need {blocks(needs)}{beside}, {are_free(free)}"
        if not about.get("enable_chunked_prefill", True) and "max_num_batched_tokens" in about:
            left = about["max_num_batched_tokens"] - self.planned
            return f"its {known} tokens must fit the budget whole, and {left} are left"
        return "its turn has not come"
