"""Events: plain dicts from which pictures, metrics and replays are made. Nearly free without a listener."""

import time
from collections.abc import Callable, Collection
from typing import Any

from nanovllm.engine.sequence import Sequence

Event = dict[str, Any]
OnEvent = Callable[[Event], None]
Blocks = Collection[int]  # block numbers
Clock = Callable[[], float]  # seconds that never run back; a simulation has its own


class Trace:
    """Tells a listener what happens to each request, and in which step.

    type       details, beside t (seconds of `clock`), step, request (its id) and choice (0 .. n - 1)
    added      prompt_tokens, priority
    admitted   cached: tokens that need not be computed
    scheduled  tokens: how many this step computes; cached: how many have been computed before
    token      ids: the new tokens
    preempted  by: [request, choice] that needs blocks or a seat; needs, free: how many blocks, before it is preempted
    finished   reason
    blocks     taken, shared, freed: lists of block numbers

    What a listener raises ends all requests. Its ValueError or TypeError arrives as a RuntimeError.
    """

    def __init__(self, on_event: OnEvent | None = None, clock: Clock = time.perf_counter) -> None:
        self.on_event = on_event
        self.clock = clock
        self.step = 0

    def emit(self, type: str, seq: Sequence, **details: Any) -> None:
        if self.on_event is not None:
            event = {"t": self.clock(), "step": self.step, "type": type, "request": seq.request_id}
            try:
                self.on_event(event | {"choice": seq.choice} | details)
            except (ValueError, TypeError) as error:  # which would be taken for a refusal of the request
                raise RuntimeError(f"on_event raised {error!r} for {type!r} of request {seq.request_id!r}") from error

    def blocks(self, seq: Sequence, *, taken: Blocks = (), shared: Blocks = (), freed: Blocks = ()) -> None:
        if self.on_event is not None and (taken or shared or freed):
            self.emit("blocks", seq, taken=list(taken), shared=list(shared), freed=list(freed))
