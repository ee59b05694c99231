"""What a caller of the engine sees: outputs, events, metrics, errors, and the state after an interruption."""

import subprocess
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.helpers import BOTH, greedy_tokens, make, run
from tests.engine.shadow import BAD, EOS, VOCAB_SIZE, ShadowExecutor, ShadowHandle, extend, next_token

GREEDY = SamplingParams(temperature=0.0, seed=1, ignore_eos=True, max_tokens=4)


def config(**more: Any) -> EngineConfig:
    values: dict[str, Any] = {"kvcache_block_size": 2, "num_kv_blocks": 32, "max_model_len": 64, "max_num_seqs": 4}
    return EngineConfig(**(values | {"async_scheduling": False} | more))


# --- outputs ---------------------------------------------------------------------------------------------------------


@BOTH
def test_outputs_grow_by_a_token_a_step_and_end_with_a_reason(asynchronous: bool) -> None:
    world = make(asynchronous=asynchronous)
    world.add([1, 2, 3], ignore_eos=True, max_tokens=3)
    seen = []
    while world.engine.has_unfinished():
        seen += [(len(o.outputs[0].token_ids), o.finished, o.outputs[0].finish_reason) for o in world.step()]
    assert seen == [(1, False, None), (2, False, None), (3, True, "length")]


def test_final_only_reports_once() -> None:
    world = make()
    world.add([1, 2, 3], ignore_eos=True, max_tokens=3, output_kind=RequestOutputKind.FINAL_ONLY)
    seen = []
    while world.engine.has_unfinished():
        seen += [len(output.outputs[0].token_ids) for output in world.step()]
    assert seen == [3]


def test_what_ends_an_output_and_what_it_says() -> None:
    prompt = next([i, 1] for i in range(VOCAB_SIZE) if EOS in greedy_tokens([i, 1], 8)[1:6])
    tokens = greedy_tokens(prompt, 8)
    end = tokens.index(EOS) + 1
    by_eos = run(make(), prompt).outputs[0]
    assert (by_eos.token_ids, by_eos.finish_reason, by_eos.stop_reason) == (tokens[:end], "stop", None)
    stop = run(make(), prompt, stop_token_ids=[tokens[0]]).outputs[0]
    assert (stop.token_ids, stop.finish_reason, stop.stop_reason) == (tokens[:1], "stop", tokens[0])
    late = run(make(), prompt, min_tokens=end + 1).outputs[0]
    assert late.token_ids == (tokens[: tokens.index(EOS, end) + 1] if EOS in tokens[end:] else tokens)
    length = run(make(), prompt, ignore_eos=True, max_tokens=8).outputs[0]
    assert (length.token_ids, length.finish_reason, length.stop_reason) == (tokens, "length", None)


def test_max_tokens_none_goes_on_to_max_model_len() -> None:
    engine = LLMEngine(executor := ShadowExecutor(config()), config(), vocab_size=VOCAB_SIZE)
    executor.engine = engine
    engine.add_request("a", [1, 2, 4], SamplingParams(temperature=0, seed=1, max_tokens=None))
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert len(outputs[-1].outputs[0].token_ids) == 64 - 3


@BOTH
def test_a_bad_row_fails_alone_and_leaves_nothing_in_the_cache(asynchronous: bool) -> None:
    world = make(mbt=4, asynchronous=asynchronous)  # so that its first blocks are published before it fails
    beside = world.add([1, 2, 3], ignore_eos=True, max_tokens=6)
    prompt = bad_prompt()
    failed = run(world, prompt)
    assert (failed.outputs[0].finish_reason, failed.outputs[0].token_ids) == ("error", [])
    assert world.outputs[beside].outputs[0].finish_reason == "length"
    again = run(world, [*prompt, 1])
    assert again.num_cached_tokens == 0


def bad_prompt() -> list[int]:
    """One after which the shadow model's logits are not finite."""
    for number in range(8**6):
        prompt = [number >> shift & 7 for shift in range(0, 18, 3)]
        prefix = 0
        for token in prompt:
            prefix = extend(prefix, token)
        if next_token(prefix, GREEDY, 0) == BAD:
            return prompt
    raise AssertionError


@BOTH
def test_n_choices_share_the_prompt_and_draw_on_their_own(asynchronous: bool) -> None:
    world = make(asynchronous=asynchronous)
    prompt = [1, 2, 3, 4, 5, 6, 0, 1]
    several = run(world, prompt, n=3, temperature=1.0, seed=5, ignore_eos=True)
    assert [choice.index for choice in several.outputs] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in several.outputs}) == 3
    computed = sum(item.num_tokens for plan in world.executor.plans for item in plan.scheduled)
    assert computed == 8 + 2 * 2 + 3 * 7  # the prompt once, its last block twice more, and the decodes
    one = run(world, prompt, n=1, temperature=1.0, seed=5, ignore_eos=True)
    assert one.outputs[0].token_ids == several.outputs[0].token_ids


def test_an_unseeded_request_draws_a_fresh_seed_and_the_engine_seed_makes_them_repeat() -> None:
    def seeds(**more: Any) -> list[int | None]:
        executor = ShadowExecutor(config())
        engine = LLMEngine(executor, config(**more), vocab_size=VOCAB_SIZE)
        for id in "ab":
            engine.add_request(id, [1, 2], SamplingParams(n=2))
        return [executor.params[key].seed for key in range(4)]

    first, second = seeds(), seeds()
    assert None not in first and len({*first, *second}) == 8
    assert seeds(seed=3) == seeds(seed=3) != seeds(seed=4)


def test_logprobs_come_with_their_tokens() -> None:
    choice = run(make(), [1, 2, 3], logprobs=1, ignore_eos=True, max_tokens=3).outputs[0]
    assert choice.logprobs is not None
    assert [list(position) for position in choice.logprobs] == [[token] for token in choice.token_ids]
    found = [position[token].logprob for position, token in zip(choice.logprobs, choice.token_ids, strict=True)]
    assert choice.cumulative_logprob == sum(found)


def test_metrics() -> None:
    world = make(seqs=1)
    slow = world.add([1, 2, 3, 4, 5], ignore_eos=True, max_tokens=8, priority=1)
    world.step()
    world.add([1, 2, 3, 4, 5], max_tokens=1)
    world.drain()
    metrics = world.outputs[slow].metrics
    assert metrics.num_preemptions == 1 and metrics.num_cached_tokens == 0
    assert world.outputs["r1"].metrics.num_cached_tokens == world.outputs["r1"].num_cached_tokens == 4
    times = metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time
    assert None not in times and list(times) == sorted(times)  # type: ignore[type-var]
    assert metrics.time_in_queue is not None and metrics.time_to_first_token is not None
    assert 0 <= metrics.time_in_queue <= metrics.time_to_first_token


def test_the_first_token_of_a_request_is_that_of_its_first_choice() -> None:
    """The second choice waits for the first one's prompt, and so has its own first token later."""
    executor = ShadowExecutor(config())
    executor.engine = engine = LLMEngine(executor, config(), vocab_size=VOCAB_SIZE, clock=count(1.0).__next__)
    engine.add_request("a", [1, 2, 3, 4, 5], SamplingParams(n=2, ignore_eos=True, max_tokens=3))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert [len(choice.token_ids) for choice in outputs[0].outputs] == [1, 0]
    assert len(outputs) > 2 and len({output.metrics.first_token_time for output in outputs}) == 1


# --- events ----------------------------------------------------------------------------------------------------------


def test_events_tell_the_whole_story() -> None:
    events: list[dict[str, Any]] = []
    executor = ShadowExecutor(config())
    executor.engine = engine = LLMEngine(executor, config(), vocab_size=VOCAB_SIZE, on_event=events.append)
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, seed=1, ignore_eos=True, max_tokens=2))
    while engine.has_unfinished():
        engine.step()
    tokens = greedy_tokens([1, 2, 3], 2)
    story = [{k: v for k, v in event.items() if k not in ("t", "request", "choice")} for event in events]
    nothing: dict[str, list[int]] = {"taken": [], "shared": [], "freed": []}
    assert story == [
        {"step": 0, "type": "added", "prompt_tokens": 3, "priority": 0},
        {"step": 0, "type": "admitted", "cached": 0},
        {"step": 0, "type": "blocks"} | nothing | {"taken": [0, 1]},
        {"step": 0, "type": "scheduled", "tokens": 3, "cached": 0},
        {"step": 0, "type": "token", "ids": tokens[:1]},
        {"step": 1, "type": "scheduled", "tokens": 1, "cached": 3},
        {"step": 1, "type": "token", "ids": tokens[1:]},
        {"step": 1, "type": "blocks"} | nothing | {"freed": [1, 0]},
        {"step": 1, "type": "finished", "reason": "length"},
    ]
    assert all(event["request"] == "a" and event["choice"] == 0 for event in events)
    assert [event["t"] for event in events] == sorted(event["t"] for event in events)


@BOTH
def test_a_token_is_told_with_the_step_that_computed_it(asynchronous: bool) -> None:
    world = make(asynchronous=asynchronous)
    world.add([1, 2, 3], ignore_eos=True, max_tokens=4)
    steps = []
    while world.engine.has_unfinished():
        world.step()
        steps += [event["step"] for event in world.events if event["type"] == "token"]
    assert steps == [0, 1, 2, 3]


def test_events_of_preemption_sharing_and_abort() -> None:
    world = make(seqs=1)
    slow = world.add([1, 2, 3, 4, 5], ignore_eos=True, priority=1)
    world.step()
    world.add([1, 2, 3, 4, 6])
    world.step()
    kinds = [(event["type"], event["request"]) for event in world.events]
    assert kinds.index(("preempted", slow)) < kinds.index(("admitted", "r1"))
    assert [len(event["shared"]) for event in world.events if event["type"] == "blocks" and event["shared"]] == [2]
    world.abort(slow)
    assert [event["reason"] for event in world.events if event["type"] == "finished"] == ["abort"]


# --- errors and interruptions ----------------------------------------------------------------------------------------


def test_a_duplicate_id_is_refused_and_may_be_used_again_once_it_is_over() -> None:
    world = make()
    id = world.add([1, 2, 3])
    with pytest.raises(ValueError, match="'r0' is in use"):
        world.add([4], id=id)
    world.drain()
    world.add([4], id=id)
    world.drain()


def failing(executor: ShadowExecutor, where: str, error: type[BaseException]) -> Callable[[], None]:
    """Make the executor raise once, when a step is submitted or collected; returns how to undo it."""

    def fail(*args: object) -> Any:
        raise error

    owner: Any = executor if where == "submit" else ShadowHandle
    good = getattr(owner, where)
    setattr(owner, where, fail)
    return lambda: setattr(owner, where, good)


@BOTH
@pytest.mark.parametrize("where", ["submit", "result"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_an_exception_in_a_step_everything_can_be_freed_and_used_again(
    error: type[BaseException], where: str, asynchronous: bool
) -> None:
    world = make(asynchronous=asynchronous, nb=12)
    for n in 1, 2, 1, 1, 1:
        world.add([1, 2, 3, 4, 5], ignore_eos=True, n=n)
    for _ in range(3):
        world.step()
    undo = failing(world.executor, where, error)
    with pytest.raises(error):
        for _ in range(2):
            world.engine.step()
    undo()
    world.engine.abort_all()
    assert not world.engine.has_unfinished() and not world.executor.tokens
    assert world.scheduler.blocks.num_free == 12
    world.executor.pending.clear()  # what was in flight is never collected
    world.requests.clear()
    world.add([1, 2, 3, 4, 5], ignore_eos=True)
    world.drain()
    world.engine.close()
    world.engine.close()
    assert world.executor.closed


def test_close_in_the_middle_frees_everything() -> None:
    world = make(asynchronous=True)
    world.add([1, 2, 3], n=2, ignore_eos=True)
    world.step()
    world.engine.close()
    assert world.executor.closed and not world.executor.tokens and not world.engine.has_unfinished()
    with pytest.raises(RuntimeError, match="this engine is closed"):
        world.add([1, 2, 3])
    assert world.engine.closed and not world.engine.has_unfinished()


def test_the_engine_says_how_many_run_and_wait() -> None:
    """Choices that wait for the first one's prompt wait like all others, but take no seat from whoever comes now."""
    world = make(seqs=2)
    engine = world.engine

    def counts() -> tuple[int, int, int]:
        return engine.num_running, engine.num_waiting, engine.num_free_seats

    id = world.add([1, 2, 3, 4, 5], n=4, ignore_eos=True)
    assert counts() == (0, 4, 2)
    world.step()
    assert counts() == (1, 3, 1)
    world.step()
    assert counts() == (2, 2, 0)
    world.abort(id)
    world.step()
    assert counts() == (0, 0, 2)
    given_up = world.add([1, 2, 3, 4, 5], n=4)
    world.abort(given_up)
    assert engine.num_waiting == 0
    world.add([1, 2, 3, 4, 5], n=4)
    engine.abort_all()
    assert counts() == (0, 0, 2)


@BOTH
def test_the_next_step_is_submitted_before_the_last_one_is_collected(asynchronous: bool) -> None:
    log: list[str] = []

    class Handle(ShadowHandle):
        def result(self) -> Any:
            log.append(f"result {self.plan.step}")
            return super().result()

    class Executor(ShadowExecutor):
        def submit(self, plan: Any) -> ShadowHandle:
            log.append(f"submit {plan.step}")
            handle = super().submit(plan)
            handle.__class__ = Handle
            return handle

    settings = config(async_scheduling=asynchronous)
    executor = Executor(settings)
    executor.engine = engine = LLMEngine(executor, settings, vocab_size=VOCAB_SIZE)
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, ignore_eos=True, max_tokens=3))
    while engine.has_unfinished():
        engine.step()
    if asynchronous:
        assert log == ["submit 0", "submit 1", "result 0", "submit 2", "result 1", "result 2"]
    else:
        assert log == ["submit 0", "result 0", "submit 1", "result 1", "submit 2", "result 2"]


def test_the_control_plane_imports_the_standard_library_and_xxhash_alone() -> None:
    """A browser runs it, where there is nothing else."""
    program = "import sys; before = set(sys.modules); import nanovllm.engine.engine; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=True)
    packages = {name.partition(".")[0] for name in done.stdout.split()}
    assert packages - sys.stdlib_module_names == {"nanovllm", "xxhash"}
