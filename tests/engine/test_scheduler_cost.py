"""What a step costs on the host: it grows with what changes, not with what waits."""

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import pytest

from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.plan import StepMasks, StepPlan, StepResult
from nanovllm.engine.sequence import Content
from nanovllm.sampling_params import RequestOutputKind, SamplingParams


class NullHandle:
    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan

    def result(self) -> StepResult:
        return StepResult({item.key: ([5], None) for item in self.plan.scheduled if item.sample})

    def guesses(self) -> dict[int, list[int]]:
        return {}

    def draw(self, masks: StepMasks) -> None: ...


class NullExecutor:
    """Takes no time, so that what is left is the control plane's."""

    def add(self, key: int, token_ids: Sequence[int], params: SamplingParams) -> None: ...

    def remove(self, key: int) -> None: ...

    def close(self) -> None: ...

    def submit(self, plan: StepPlan) -> NullHandle:
        return NullHandle(plan)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Content]:
    """The content of every block that is looked at for a hit."""
    found = []
    matches = Content.matches

    def spy(content: Content, *text: Any) -> bool:
        found.append(content)
        return matches(content, *text)

    monkeypatch.setattr(Content, "matches", spy)
    return found


@pytest.mark.parametrize("num_worse", [0, 2], ids=["none to preempt", "not enough to preempt"])
@pytest.mark.parametrize("in_use", [True, False], ids=["hits in use", "free hits"])
def test_the_first_that_waits_is_not_looked_up_in_every_step(
    compared: list[Content], in_use: bool, num_worse: int
) -> None:
    """It has a long cached beginning and does not fit, while others take and free blocks in every step."""
    config = EngineConfig(
        kvcache_block_size=4, num_kv_blocks=240, max_model_len=1000, max_num_seqs=16, async_scheduling=False
    )
    engine = LLMEngine(NullExecutor(), config, vocab_size=1000)
    beginning = list(range(400))
    engine.add_request("a", beginning, SamplingParams(max_tokens=100 if in_use else 1, ignore_eos=True))
    engine.step()
    for i in range(8):
        engine.add_request(str(i), [i], SamplingParams(max_tokens=20 + 8 * i, ignore_eos=True), priority=i < num_worse)
    engine.step()
    engine.add_request("first", [*beginning, *range(450, 990)], SamplingParams(max_tokens=1, ignore_eos=True))
    del compared[:]
    num_steps = 0
    while len(engine.scheduler.waiting):
        engine.step()
        num_steps += 1
    assert num_steps > 50 and len(compared) == 2 * 100, "looked up when it comes, and when it fits"


def milliseconds_a_step(num_waiting: int, asynchronous: bool, num_running: int = 512) -> float:
    """CPU time of `schedule` and `commit` together: the lower quartile of 100 decode steps, since other work on the
    machine can only make a step look dearer."""
    config = EngineConfig(
        kvcache_block_size=16,
        num_kv_blocks=40_000,
        max_model_len=4096,
        max_num_seqs=num_running,
        async_scheduling=asynchronous,
    )
    engine = LLMEngine(NullExecutor(), config, vocab_size=1000)
    rng = random.Random(0)
    params = SamplingParams(max_tokens=1000, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    for i in range(num_running + num_waiting):
        engine.add_request(str(i), rng.choices(range(1000), k=100), params, priority=i % 3 if i >= num_running else 0)
    for _ in range(8):
        engine.step()
    scheduler = engine.scheduler
    assert len(scheduler.running) == num_running and len(scheduler.waiting) == num_waiting
    times = []
    in_flight = list(engine._in_flight)
    for _ in range(100):
        start = time.process_time()
        plan = scheduler.schedule()
        middle = time.process_time()
        in_flight.append((plan, NullHandle(plan)))
        oldest, handle = in_flight.pop(0)
        result = handle.result()
        resumed = time.process_time()
        scheduler.commit(oldest, result)
        times.append(middle - start + time.process_time() - resumed)
    return statistics.quantiles(times, n=4)[0] * 1e3


@pytest.mark.parametrize(
    "asynchronous", [pytest.param(False, marks=pytest.mark.slow, id="sync"), pytest.param(True, id="async")]
)
def test_ten_thousand_waiting_cost_nothing(asynchronous: bool) -> None:
    """On a quiet machine of two cores 512 running sequences take well under 2 ms; the bound allows for a busy one."""
    none, many = (milliseconds_a_step(waiting, asynchronous) for waiting in (0, 10_000))
    print(f"\nschedule + commit, 512 running: {none:.2f} ms; with 10,000 waiting: {many:.2f} ms")
    assert many < 10
    assert many < 2.5 * none
