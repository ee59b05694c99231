"""E1: what may be called from which thread or process, and from inside a call: right, or an error at once."""

import asyncio
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.engine.one_at_a_time import Calls, one_at_a_time
from nanovllm.stream import EngineDead
from tests.engine.test_llm_errors import check_idle
from tests.weights import lively_qwen3

PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7, 1], [8, 2, 8, 4, 5, 9, 0, 4], [5]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL: dict[str, Any] = {"num_kv_blocks": 40, "kvcache_block_size": 4, "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_qwen3(tmp_path_factory.getbasetemp() / "engine-checkpoints")


class Spy:
    """An `on_event` that can be told what to do at the next event."""

    def __init__(self) -> None:
        self.act: Callable[[], object] | None = None

    def __call__(self, event: object) -> None:
        act, self.act = self.act, None
        if act is not None:
            act()


@pytest.fixture(scope="module")
def spy() -> Spy:
    return Spy()


@pytest.fixture
def llm(path: Path, spy: Spy) -> Iterator[LLM]:
    with LLM(path, **SMALL, on_event=spy) as llm:
        yield llm
    assert spy.act is None


def ids(llm: LLM, prompts: Any, **more: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, **{"use_tqdm": False} | more)]


def elsewhere(call: Callable[[], Any]) -> Any:
    """What another thread gets from a call: its result, or its error is raised here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(timeout=30)


def test_threads_get_their_turns_and_the_right_tokens(llm: LLM) -> None:
    alone = [ids(llm, [prompt, prompt[::-1]]) for prompt in PROMPTS]
    together = threading.Barrier(len(PROMPTS))

    def ask(prompt: list[int]) -> list[Any]:
        together.wait()
        return [ids(llm, [prompt, prompt[::-1]]) for _ in range(2)]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(ask, PROMPTS))
    assert found == [[expected] * 2 for expected in alone]
    check_idle(llm)


@pytest.mark.parametrize("call", ["generate", "close", "bar"])
def test_a_call_from_inside_a_call_is_refused_at_once(llm: LLM, spy: Spy, call: str) -> None:
    expected = ids(llm, PROMPTS)

    def make_bar(**_: Any) -> Any:
        return llm.generate([[1]], GREEDY)

    more = {"use_tqdm": make_bar} if call == "bar" else {}
    if call != "bar":
        spy.act = llm.close if call == "close" else lambda: llm.generate([[1]], GREEDY)
    with pytest.raises(RuntimeError, match=r"LLM\.(generate|close) was called from inside another call.*on_event"):
        ids(llm, PROMPTS, **more)
    check_idle(llm)
    assert ids(llm, PROMPTS) == expected


def test_close_waits_for_the_call_of_another_thread(llm: LLM, spy: Spy) -> None:
    expected = ids(llm, PROMPTS)
    closing = threading.Thread(target=llm.close)
    spy.act = closing.start
    assert ids(llm, PROMPTS) == expected
    closing.join(timeout=30)
    assert llm.engine.closed
    with pytest.raises(RuntimeError, match="closed"):
        ids(llm, PROMPTS)


@pytest.mark.parametrize("method", ["step", "add_request", "abort_request", "abort_all", "close"])
def test_the_engine_refuses_a_second_caller(llm: LLM, spy: Spy, method: str) -> None:
    """From another thread in the middle of a step, and from `on_event`. Nothing has changed then."""
    expected = ids(llm, PROMPTS)
    arguments = {"add_request": ("x", [1], GREEDY), "abort_request": ("0",)}.get(method, ())
    refused: list[str] = []

    def call() -> None:
        with pytest.raises(RuntimeError) as raised:
            getattr(llm.engine, method)(*arguments)
        refused.append(str(raised.value))

    def twice() -> None:
        call()
        elsewhere(call)

    spy.act = twice
    assert ids(llm, PROMPTS) == expected
    inside, other = refused
    assert f"LLMEngine.{method} was called from inside another call" in inside
    assert f"LLMEngine.{method} was called while another thread" in other and "AsyncLLM" in other
    check_idle(llm)
    assert llm.engine.check_request([1], GREEDY) == ([1], 9)


def test_the_engine_of_an_async_llm_belongs_to_its_step_loop(path: Path, spy: Spy) -> None:
    async def run() -> None:
        llm = AsyncLLM(path, **SMALL, on_event=spy)
        stream = llm.generate([3, 1, 4], GREEDY)
        with pytest.raises(RuntimeError, match="AsyncLLM"):
            llm.llm.generate([[1]], GREEDY)
        found = [token async for delta in stream for token in delta.outputs[0].token_ids]
        assert len(found) == 8
        # Whoever waits for the step loop inside of it would wait for ever.
        refused: list[str] = []

        def call_back() -> None:
            for call in (lambda: asyncio.run(llm.shutdown()), lambda: llm.generate([1], GREEDY)):
                with pytest.raises(RuntimeError) as raised:
                    call()
                refused.append(str(raised.value))

        spy.act = call_back
        async for _ in llm.generate([3, 1, 4], GREEDY):
            pass
        assert len(refused) == 2 and all("on_event" in message for message in refused)
        await llm.shutdown()
        with pytest.raises(EngineDead):
            llm.generate([1], GREEDY)
        llm.llm.close()

    asyncio.run(run())


def test_a_thread_is_not_taken_for_the_caller_of_the_call_that_begins() -> None:
    """Between taking the lock and saying who it is, another thread may run: the one that called last, say."""

    class Counter:
        calls = Calls()
        count = 0

        @one_at_a_time(wait=True)
        def add(self) -> None:
            self.count += 1

    class SlowLock:
        """Others run when a thread has just taken it."""

        def __init__(self) -> None:
            self.lock, self.taken, self.go_on = threading.Lock(), threading.Event(), threading.Event()

        def __enter__(self) -> None:
            self.lock.acquire()
            self.taken.set()
            assert self.go_on.wait(30)

        def __exit__(self, *error: object) -> None:
            self.lock.release()

        def locked(self) -> bool:
            return self.lock.locked()

    counter = Counter()
    counter.add()
    slow: Any = SlowLock()
    counter.calls.lock = slow
    other = threading.Thread(target=counter.add)
    other.start()
    assert slow.taken.wait(30)
    threading.Timer(0.05, slow.go_on.set).start()
    counter.add()  # waits for the other one
    other.join()
    assert counter.count == 3


def test_of_two_threads_that_come_at_once_one_is_let_in_and_the_other_does_not_wait() -> None:
    """With `wait=False`: both say who they are before either looks who is in."""

    class Door:
        calls = Calls()
        leave = threading.Event()

        @one_at_a_time(wait=False)
        def enter(self) -> None:
            assert self.leave.wait(30)

    class AtOnce(list[int]):
        both = threading.Barrier(2)

        def append(self, thread: int) -> None:
            super().append(thread)
            self.both.wait(30)

    door = Door()
    door.calls.threads = AtOnce()
    with ThreadPoolExecutor(2) as pool:
        visits = [pool.submit(door.enter) for _ in range(2)]
        first = next(as_completed(visits, 30))
        with pytest.raises(RuntimeError, match="while another thread is in a call"):
            first.result()
        door.leave.set()
        visits.remove(first)
        visits[0].result(30)
    assert not door.calls.threads


class Refuses:
    """An `on_event` that raises whenever a request ends."""

    def __call__(self, event: dict[str, Any]) -> None:
        if event["type"] == "finished":
            raise RuntimeError("I want to hear nothing")


def test_memory_is_given_back_though_on_event_raises(path: Path) -> None:
    llm = LLM(path, **SMALL, on_event=Refuses())
    for i, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(i), prompt, GREEDY)
    llm.engine.step()
    executor: Any = llm.engine.executor
    with pytest.raises(RuntimeError, match="hear nothing"):
        llm.close()
    assert executor.runner.closed and not executor.sequences


def test_a_step_loop_gives_memory_back_though_on_event_raises(path: Path) -> None:
    async def run() -> None:
        llm = AsyncLLM(path, **SMALL, on_event=Refuses())
        streams = [llm.generate(prompt, GREEDY) for prompt in PROMPTS]
        for stream in streams:
            with pytest.raises(EngineDead):
                async for _ in stream:
                    pass
        await llm.shutdown()
        executor: Any = llm.llm.engine.executor
        assert executor.runner.closed
        llm.llm.close()

    asyncio.run(run())


def wrong_number(event: dict[str, Any]) -> None:
    """An `on_event` with a fault of its own."""
    int(event["type"])


@pytest.mark.parametrize("type", ["added", "token"])
def test_a_value_error_of_on_event_is_no_refusal_of_a_request(llm: LLM, spy: Spy, type: str) -> None:
    """It is not told as one, and it ends every request, as any error there does."""
    expected = ids(llm, PROMPTS)

    def fail(event: Any) -> None:
        if event["type"] == type and event["request"].endswith("9"):
            wrong_number(event)

    llm.engine.trace.on_event = fail
    with pytest.raises(RuntimeError, match=rf"on_event raised ValueError\(.*for '{type}' of request '\d*9'"):
        ids(llm, PROMPTS * 3)
    llm.engine.trace.on_event = spy
    check_idle(llm)
    assert ids(llm, PROMPTS) == expected


def test_a_value_error_of_on_event_ends_the_step_loop(path: Path) -> None:
    async def run() -> None:
        llm = AsyncLLM(path, **SMALL, on_event=wrong_number)
        with pytest.raises(EngineDead, match="on_event raised ValueError"):
            async for _ in llm.generate([1, 2], GREEDY):
                pass
        with pytest.raises(EngineDead):
            llm.check_health()
        await llm.shutdown()

    asyncio.run(run())


def forked(call: Callable[[], object]) -> str:
    """What a forked process says of a call: its error."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def run() -> None:
        try:
            call()
        except Exception as error:
            writer.send(f"{type(error).__name__}: {error}")

    process = context.Process(target=run)
    process.start()
    try:
        assert reader.poll(60), "it hangs"
        return str(reader.recv())
    finally:
        process.kill()
        process.join()


def test_a_forked_process_is_refused_and_does_not_hang(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with LLM(path, **SMALL) as llm:
        assert "LLM was made before this process was forked" in forked(lambda: ids(llm, PROMPTS))
        assert "RuntimeError: this process was forked" in (said := forked(lambda: LLM(path, **SMALL)))
        assert "get_context('spawn')" in said
        LLM(path, **SMALL).close()

    async def serve() -> None:
        async with AsyncLLM(path, **SMALL) as llm:
            assert forked(lambda: llm.generate([1], GREEDY)).startswith("EngineDead: this AsyncLLM was made before")

    asyncio.run(serve())
