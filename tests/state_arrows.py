"""What becomes of a sequence and of a KV block, found out from the code: the drawings in docs are held to it.

The engine runs without a model on a few requests that share, wait, are preempted and end in every way there is.
Whatever state then follows another is an arrow. The states of a sequence are those of `SequenceStatus`; those of a
block are what its reference count and its findable content say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.plan import StepMasks, StepPlan, StepResult
from nanovllm.engine.sequence import SequenceStatus
from nanovllm.sampling_params import SamplingParams

Arrow = tuple[str, str, str]  # from, to, what makes it so
START = "[*]"
BLOCK_STATES = ("free, empty", "free, findable", "in use", "in use, findable", "shared, findable")
BAD, EOS, PLAIN = -1, 2, 1  # tokens of the executor below


class Tokens:
    """An executor without a model: the first token of a request's prompt says how the request ends."""

    def __init__(self) -> None:
        self.first: dict[int, int] = {}
        self.step = StepResult({})

    def add(self, key: int, token_ids: Sequence[int], params: SamplingParams) -> None:
        self.first[key] = token_ids[0]

    def remove(self, key: int) -> None:
        self.first.pop(key, None)

    def submit(self, plan: StepPlan) -> Tokens:
        ends = {3: EOS, 4: BAD if plan.step > 6 else PLAIN}
        self.step = StepResult(
            {i.key: ([ends.get(self.first[i.key], PLAIN)], None) for i in plan.scheduled if i.sample}
        )
        return self

    def guesses(self) -> dict[int, list[int]]:
        return {}

    def draw(self, masks: StepMasks) -> None: ...

    def result(self) -> StepResult:
        return self.step

    def close(self) -> None:
        self.first.clear()


def drive(watch: Callable[[LLMEngine], None]) -> None:
    """A run in which everything happens that can happen to a sequence or a block."""
    config = EngineConfig(
        kvcache_block_size=2, num_kv_blocks=7, max_num_seqs=3, max_num_batched_tokens=8, max_model_len=14,
        async_scheduling=False,
    )  # fmt: skip
    engine = LLMEngine(Tokens(), config, vocab_size=10, eos_token_ids={EOS})
    watch(engine)
    for i, first in enumerate((5, 5, 6, 3, 7, 4)):
        engine.add_request(str(i), [first, 8, 8, 9, 9][: 5 - i % 2], SamplingParams(temperature=0, max_tokens=7))
    engine.step()
    engine.add_request("given up while it waits", [5, 5], SamplingParams())
    engine.abort_request("given up while it waits")
    engine.abort_request("1")
    while engine.has_unfinished():
        engine.step()
    for again in ("first", "second"):  # the second finds what the first has computed and still holds
        engine.add_request(again, [5, 8, 8, 9, 9], SamplingParams(temperature=0, max_tokens=5))
        engine.step()
    while engine.has_unfinished():
        engine.step()


def sequence_arrows() -> set[Arrow]:
    """Every change of `Sequence.status`, with the event that told it."""
    arrows: set[Arrow] = set()

    def watch(engine: LLMEngine) -> None:
        seqs: dict[str, Any] = {}
        before: dict[str, str] = {}

        def on_event(event: dict[str, Any]) -> None:
            request = event["request"]
            if event["type"] == "added":
                seqs[request] = next(s for s in engine.scheduler.sequences.values() if s.request_id == request)
            if event["type"] == "blocks":  # told on the way, when the status may have changed already
                return
            now, was = seqs[request].status.value, before.get(request, START)
            if now != was:
                arrows.add((was, now, " ".join(filter(None, (event["type"], event.get("reason"))))))
            before[request] = now

        engine.trace.on_event = on_event

    drive(watch)
    last = SequenceStatus.FINISHED.value
    return arrows | {(last, START, "")}


def block_arrows() -> set[Arrow]:
    """Every change of a block's state, with the method of the block manager that made it."""
    arrows: set[Arrow] = set()

    def watch(engine: LLMEngine) -> None:
        blocks = engine.scheduler.blocks

        def observed(name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before = [block_state(blocks, b) for b in range(blocks.num_blocks)]
            result = method(*args, **kwargs)
            after = [block_state(blocks, b) for b in range(blocks.num_blocks)]
            arrows.update((x, y, name) for x, y in zip(before, after, strict=True) if x != y)
            return result

        for name in ("share", "grow", "publish", "release"):
            setattr(blocks, name, partial(observed, name, getattr(blocks, name)))

    drive(watch)
    return arrows | {(START, BLOCK_STATES[0], "")}


def block_state(blocks: BlockManager, block: int) -> str:
    users = min(blocks.ref_counts[block], 2)
    findable = blocks.contents[block] is not None
    if users == 2:
        return BLOCK_STATES[4] if findable else "shared"
    return BLOCK_STATES[2 * users + findable]
