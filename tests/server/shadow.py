"""AsyncLLM over the shadow executor of the engine's tests: steps cost microseconds, and every wrong block shows."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

from nanovllm import AsyncLLM, RequestOutput
from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.plan import StepPlan
from nanovllm.sampling_params import SamplingParams
from tests.engine.shadow import ALL, EOS, VOCAB_SIZE, ShadowExecutor, ShadowHandle, next_token
from tests.server.waiting import until

SMALL: dict[str, Any] = {"num_kv_blocks": 64, "kvcache_block_size": 16, "max_model_len": 256, "max_num_seqs": 8}
SMALL["seed"] = 0  # so that a sample without a seed is no matter of luck


def finite(prefix: int, params: SamplingParams, output_index: int, mask: int = ALL) -> int:
    """The next token, where the logits are always finite."""
    return max(0, next_token(prefix, params, output_index, mask))


class HealthyExecutor(ShadowExecutor):
    """None of its rows is bad."""

    def submit(self, plan: StepPlan) -> ShadowHandle:
        with patch("tests.engine.shadow.next_token", finite):
            return super().submit(plan)


class ShadowLLM:
    """As much of `LLM` as AsyncLLM touches. It has no tokenizer; a text stands for ids all the same."""

    tokenizer = None
    sampling_defaults: dict[str, Any] = {}  # noqa: RUF012 (nobody writes to it)

    def __init__(self, model: None, *, on_event: Any = None, **config: Any) -> None:
        self.config = EngineConfig(**({"async_scheduling": False} | config))
        executor = HealthyExecutor(self.config)
        self.engine = LLMEngine(executor, self.config, vocab_size=VOCAB_SIZE, eos_token_ids={EOS}, on_event=on_event)
        executor.engine = self.engine

    def encode(self, prompt: Mapping[str, Any]) -> Sequence[int]:
        return prompt.get("prompt_token_ids") or [ord(letter) % VOCAB_SIZE for letter in prompt["prompt"]]

    def prepare(self, params: SamplingParams) -> SamplingParams:
        return params

    def close(self) -> None:
        self.engine.close()


def shadow_llm(**config: Any) -> AsyncLLM:
    with patch("nanovllm.async_llm.LLM", ShadowLLM):
        return AsyncLLM(**(SMALL | config))


def executor(llm: AsyncLLM) -> HealthyExecutor:
    assert isinstance(llm.llm.engine.executor, HealthyExecutor)
    return llm.llm.engine.executor


OPENERS: list[Callable[[], None]] = []  # of the gates of the running test: one that fails must not hang


def open_gates() -> None:
    while OPENERS:
        OPENERS.pop()()


class Gate:
    """Holds the step loop back before each step until a test lets it go on."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._permits = threading.Semaphore(0)
        self._at_gate = False
        self._is_open = False
        self.num_steps = 0
        step = llm.llm.engine.step

        def gated() -> list[RequestOutput]:
            if not self._is_open:
                self._at_gate = True
                self._permits.acquire()
                self._at_gate = False
            self.num_steps += 1
            return step()

        llm.llm.engine.step = gated
        OPENERS.append(self.open)

    async def let(self, steps: int) -> None:
        """Wait until so many more steps have run and the loop stands still again."""
        for _ in range(steps):
            await until(lambda: self._at_gate)
            target = self.num_steps + 1
            self._permits.release()
            await until(partial(self._has_run, target))

    async def go(self, condition: Callable[[], bool]) -> None:
        """Step until something is the case, which may already be so."""
        for _ in range(200):
            if condition():
                return
            await self.let(1)
        raise AssertionError("it did not come to that")

    def open(self) -> None:
        self._is_open = True
        self._permits.release()

    def _has_run(self, num_steps: int) -> bool:
        return self.num_steps >= num_steps and (self._at_gate or self._idle())

    def _idle(self) -> bool:
        return not (self._llm._added or self._llm.llm.engine.has_unfinished() or self._llm._inbox.qsize())
