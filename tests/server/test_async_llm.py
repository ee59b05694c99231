"""AsyncLLM: what its callers see of their own requests, whoever else is there."""

import asyncio
import gc
import weakref
from typing import Any

import pytest

from nanovllm import LLM, AsyncLLM, RequestOutput, SamplingParams
from nanovllm.admission import QueueFull
from nanovllm.async_llm import tell
from nanovllm.sampling_params import RequestOutputKind
from nanovllm.server.engine_process import EngineServer
from nanovllm.server.outbox import Outbox
from nanovllm.stream import Pending, RequestAborted
from tests.server.harness import STORY, greedy, idle, read, serving, tokens
from tests.server.pair import one as stream_of
from tests.server.pair import pair, whole
from tests.server.pure import PureLLM
from tests.server.shadow import SMALL, Gate, shadow_llm
from tests.server.waiting import until

PROMPTS = [STORY, "Once upon a time", "Otto the raccoon", "Far, far away"]


def test_deltas_joined_are_what_llm_generates() -> None:
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=20, n=1 + i % 2, logprobs=1) for i in range(4)]

    async def main() -> list[Any]:
        async with AsyncLLM(**SMALL) as llm:
            streams = [llm.generate(prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
            return await asyncio.gather(*map(read, streams))

    streamed = asyncio.run(main())
    with LLM(**SMALL) as llm:
        expected = [output.outputs for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    for ours, theirs in zip(streamed, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
            assert one.logprobs is not None and other.logprobs is not None
            assert [list(entry) for entry in one.logprobs] == [list(entry) for entry in other.logprobs]


def test_a_reader_who_keeps_up_gets_each_token_as_it_comes() -> None:
    async def main() -> None:
        async with serving() as llm:
            gate = Gate(llm)
            stream = llm.generate(STORY, greedy(max_tokens=4))
            for i in range(4):
                reading = asyncio.create_task(anext(stream))
                await gate.let(1)
                delta = await reading
                assert len(delta.outputs[0].token_ids) == 1 and delta.finished == (i == 3)
            assert delta.prompt == STORY and delta.metrics.time_to_first_token is not None
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    asyncio.run(main())


def test_a_slow_reader_gets_fewer_and_larger_deltas_and_costs_no_memory() -> None:
    async def main() -> None:
        async with serving() as llm:
            whole = await tokens(llm.generate(STORY, greedy(max_tokens=30)))
            gate = Gate(llm)
            stream = llm.generate(STORY, greedy(max_tokens=30))
            await gate.let(3)
            first = await anext(stream)
            assert 1 <= len(first.outputs[0].token_ids) <= 3
            gate.open()
            await until(lambda: not llm._requests)
            assert len(stream._request.newest) == 1
            rest = await anext(stream)
            assert rest.finished and first.outputs[0].token_ids + rest.outputs[0].token_ids == whole

    asyncio.run(main())


def test_the_newest_request_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a first token does not wait until the others of its step are read."""
    told: list[list[int]] = []

    def note(requests: list[Pending]) -> None:
        told.append([int(request.key) for request in requests])
        tell(requests)

    monkeypatch.setattr("nanovllm.async_llm.tell", note)

    async def main() -> None:
        async with serving() as llm:
            await asyncio.gather(*[tokens(llm.generate(STORY, greedy(max_tokens=10))) for _ in range(3)])

    asyncio.run(main())
    assert max(map(len, told)) > 1 and all(keys == sorted(keys, reverse=True) for keys in told)


def test_the_newest_request_is_sent_first_to_an_api_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a first token does not wait until the others of its step are written."""
    steps: list[list[int]] = []
    hand_out, add = EngineServer._hand_out, Outbox.add

    def note_step(server: EngineServer, *arguments: Any) -> None:
        steps.append([])
        hand_out(server, *arguments)

    def note_stream(outbox: Outbox, stream: int, token_ids: list[int]) -> None:
        steps[-1].append(stream)
        add(outbox, stream, token_ids)

    monkeypatch.setattr(EngineServer, "_hand_out", note_step)
    monkeypatch.setattr(Outbox, "add", note_stream)

    async def main() -> None:
        async with pair(PureLLM()) as (_, [client]):
            streams = [await stream_of(client, {"prompt": "Once"}, SamplingParams(max_tokens=8)) for _ in range(3)]
            await asyncio.gather(*map(whole, streams))

    asyncio.run(main())
    assert max(map(len, steps)) > 1 and all(streams == sorted(streams, reverse=True) for streams in steps)


def test_final_only_is_one_delta_with_everything() -> None:
    async def main() -> list[RequestOutput]:
        async with serving() as llm:
            params = greedy(output_kind=RequestOutputKind.FINAL_ONLY)
            return [delta async for delta in llm.generate(STORY, params)]

    (only,) = asyncio.run(main())
    assert only.finished and len(only.outputs[0].token_ids) == 8


def test_callers_in_many_threads_each_with_an_event_loop() -> None:
    async def alone(llm: AsyncLLM, i: int) -> list[int]:
        return await tokens(llm.generate([i, 2, 3], SamplingParams(seed=i, max_tokens=12)))

    async def main() -> None:
        async with serving() as llm:
            expected = [await alone(llm, i) for i in range(8)]
            together = await asyncio.gather(*(asyncio.to_thread(asyncio.run, alone(llm, i)) for i in range(8)))
            assert together == expected

    asyncio.run(main())


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "more", "message"),
    [
        ([], {}, "got 0"),
        (["a", "b"], {}, "got 2"),
        ("", {}, "prompt_token_ids is empty"),
        ([10**6], {}, "outside the vocabulary"),
        ([1] * 300, {}, "max_model_len=256"),
        (["a"], {"priority": "high"}, "priority must be an integer; got 'high'"),
        (["a"], {"request_id": 5}, "request_id must be a string or None; got 5"),
        (["a"], {"sampling_params": {}}, "sampling_params must be SamplingParams; got {}"),
        ({"prompt": "a", "cache_salt": "\ud800"}, {}, "cache_salt"),
        ({"prompt": "a", "cache_salt": "\ud800\uffff"}, {}, "cache_salt"),
        ({"prompt_token_ids": [1], "cache_salt": 5}, {}, "cache_salt"),
    ],
)
def test_a_bad_request_is_refused_at_once_and_others_go_on(prompt: Any, more: dict[str, Any], message: str) -> None:
    async def main() -> None:
        async with serving() as llm:
            beside = asyncio.create_task(tokens(llm.generate(STORY, greedy())))
            with pytest.raises((ValueError, TypeError), match=message):
                llm.generate(prompt, **{"sampling_params": greedy()} | more)
            assert len(await beside) == 8

    asyncio.run(main())


def test_what_only_the_engine_refuses_reaches_its_reader_and_nobody_else() -> None:
    async def main() -> None:
        async with serving() as llm:
            beside = asyncio.create_task(tokens(llm.generate([1, 2], greedy())))
            with pytest.raises(ValueError, match="needs a tokenizer"):
                await read(llm.generate([1, 2], greedy(stop="x")))
            assert len(await beside) == 8

    asyncio.run(main())


def test_a_full_queue_refuses_and_an_empty_seat_is_not_a_queue() -> None:
    async def main() -> None:
        async with serving(max_queue=2, max_num_seqs=3) as llm:
            gate = Gate(llm)
            held = [llm.generate([i, 1], greedy()) for i in range(1, 6)]  # three will find a seat, two will wait
            with pytest.raises(QueueFull, match="max_queue=2"):
                llm.generate([7, 1], greedy())
            await gate.let(1)
            with pytest.raises(QueueFull):
                llm.generate([7, 1], greedy())
            gate.open()
            assert [len(await tokens(stream)) for stream in held] == [8] * 5
            assert len(await tokens(llm.generate([7, 1], greedy()))) == 8
        with pytest.raises(ValueError, match="max_queue"):
            AsyncLLM(max_queue=0)
        with pytest.raises(TypeError, match="max_queue must be an integer or None; got '9'"):
            AsyncLLM(max_queue="9")

    asyncio.run(main())


def test_a_seat_without_memory_is_no_seat() -> None:
    async def main() -> None:
        async with serving(max_queue=1, num_kv_blocks=4, enable_prefix_caching=False) as llm:
            gate = Gate(llm)
            held = [llm.generate([i] * 48, greedy()) for i in (1, 2)]  # three of the four blocks each
            await gate.let(2)
            with pytest.raises(QueueFull):
                llm.generate([3], greedy())
            gate.open()
            assert [len(await tokens(stream)) for stream in held] == [8, 8]

    asyncio.run(main())


# --- ids -------------------------------------------------------------------------------------------------------------


def test_a_late_abort_never_hits_a_new_request_with_the_same_id() -> None:
    """CASES A1: a duplicate id; an id aborted and used again."""

    async def main() -> None:
        async with serving() as llm:
            expected = await tokens(llm.generate([1, 2, 3], greedy()))
            gate = Gate(llm)
            old = llm.generate([5, 6], greedy(), request_id="a")
            with pytest.raises(ValueError, match="'a' is in use"):
                llm.generate([1], greedy(), request_id="a")
            await gate.let(1)
            await anext(old)
            llm.abort("a")
            new = llm.generate([1, 2, 3], greedy(), request_id="a")  # before the loop has seen the abort
            await old.aclose()
            old._abort()
            llm.abort("b")
            gate.open()
            assert await tokens(new) == expected

    asyncio.run(main())


def test_an_id_is_free_again_once_its_request_has_finished() -> None:
    async def main() -> None:
        async with serving() as llm:
            for _ in range(3):
                assert len(await tokens(llm.generate([1, 2], greedy(), request_id="a"))) == 8

    asyncio.run(main())


# --- leaving ---------------------------------------------------------------------------------------------------------


async def gone(llm: AsyncLLM, gate: Gate) -> None:
    """The only request is given up, long before it would have ended."""
    await until(lambda: not llm._requests)
    await gate.let(1)
    await until(lambda: not llm._added and not llm.llm.engine.has_unfinished())


def test_leaving_the_loop_early_aborts() -> None:
    async def leave(llm: AsyncLLM) -> None:
        async for _ in llm.generate(STORY, greedy(max_tokens=200)):
            break

    async def main() -> None:
        async with serving() as llm:
            gate = Gate(llm)
            leaving = asyncio.create_task(leave(llm))
            await gate.let(1)
            await leaving
            await gone(llm, gate)

    asyncio.run(main())


def test_a_stream_that_is_dropped_unread_is_aborted() -> None:
    async def main() -> None:
        async with serving() as llm:
            gate = Gate(llm)
            llm.generate(STORY, greedy(max_tokens=200))
            gc.collect()
            await gone(llm, gate)

    asyncio.run(main())


def test_a_reader_whose_event_loop_is_gone_has_left() -> None:
    async def begin(llm: AsyncLLM) -> Any:
        stream = llm.generate(STORY, greedy(max_tokens=200))
        await anext(stream)
        return stream

    async def main() -> None:
        async with serving() as llm:
            gate = Gate(llm)
            beginning = asyncio.create_task(asyncio.to_thread(asyncio.run, begin(llm)))
            await gate.let(1)
            kept = await beginning
            await gate.go(lambda: not llm._requests)
            gate.open()
            await idle(llm)
            with pytest.raises(RequestAborted):
                while True:
                    await anext(kept)

    asyncio.run(main())


def test_one_that_nobody_holds_any_more_gives_its_memory_back() -> None:
    async def main() -> tuple[Any, Any, int]:
        llm = shadow_llm()
        running = llm.generate(STORY, greedy(max_tokens=20))
        first = await anext(running)
        engine, thread = llm.llm.engine, llm._thread
        del llm  # its stream still holds it
        rest = [] if first.finished else await tokens(running)
        return engine, thread, len(first.outputs[0].token_ids) + len(rest)

    engine, thread, number = asyncio.run(main())
    assert number == 20
    gc.collect()
    thread.join(20)
    assert not thread.is_alive() and engine.closed


def test_a_request_that_is_over_is_held_by_nothing_while_others_go_on() -> None:
    async def main() -> None:
        async with serving() as llm:
            gate = Gate(llm)
            reading = asyncio.create_task(tokens(llm.generate(STORY, greedy(max_tokens=1))))
            await until(lambda: llm._requests)
            held = weakref.ref(next(iter(llm._requests.values())))
            other = llm.generate(STORY, greedy(max_tokens=200))
            await gate.go(reading.done)
            await gate.let(2)
            del reading
            gc.collect()
            assert held() is None
            gate.open()
            assert len(await tokens(other)) == 200

    asyncio.run(main())


def test_one_that_was_shut_down_twice_is_held_by_nothing() -> None:
    async def main() -> weakref.ref[AsyncLLM]:
        llm = shadow_llm()
        await llm.shutdown()
        await llm.shutdown()  # what it puts into the inbox is never taken out
        return weakref.ref(llm)

    found = asyncio.run(main())
    gc.collect()
    assert found() is None
