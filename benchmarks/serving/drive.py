"""The same arrivals for all ways of serving: the engine's own loop, `AsyncLLM`, and over HTTP."""

import asyncio
import multiprocessing
import random
import time
from typing import Any, NamedTuple

from benchmarks.serving import load, mock, speed

WARM_UP = 4.0, 2.0, 99  # requests a second, seconds, seed
HIGHEST_ID = 500
SHARES = ("p50", "p99")

Figures = dict[str, float]  # tokens_per_second; first_p50, first_p99, gap_p50 and gap_p99 in milliseconds


class Asked(NamedTuple):
    """A request: when it is sent, in seconds from the start, and what."""

    time: float
    prompt: list[int]
    max_tokens: int


def arrivals(rate: float, seconds: float, seed: int, gpu: bool = False) -> list[Asked]:
    """Poisson arrivals. Lengths are those of benchmarks/serving/load.py, or on a GPU those of speed.py."""
    draw, found, now = random.Random(seed), [], 0.0
    while (now := now + draw.expovariate(rate)) < seconds:
        if gpu:
            lengths = speed.length(draw, speed.MEAN_PROMPT, 1500), speed.length(draw, speed.MEAN_OUTPUT, 1500)
        else:
            lengths = draw.randint(16, 128), draw.randint(8, 64)
        found.append(Asked(now, [draw.randrange(1, HIGHEST_ID) for _ in range(lengths[0])], lengths[1]))
    return found


class Seen(NamedTuple):
    """What clients saw, and when the requests were really sent, in seconds from the start."""

    figures: Figures
    sent: list[float]


def figures(answers: list[dict[str, Any]], gaps: list[float]) -> Figures:
    """Of answers as `speed.request` gives them, with ends in seconds from the start. Raises RuntimeError for one that
    is not whole."""
    if lost := sum(not answer["finished"] for answer in answers):
        raise RuntimeError(f"{lost} of {len(answers)} requests got no whole answer")
    found = {"tokens_per_second": sum(a["tokens"] for a in answers) / max(a["end"] for a in answers)}
    for name, values in ("first", [a["first"] for a in answers]), ("gap", gaps):
        for share in SHARES:
            found[f"{name}_{share}"] = 1e3 * (load.percentile(values, int(share[1:]) / 100) or 0.0)
    return found


async def ask(port: int, asked: list[Asked], start: float) -> tuple[list[dict[str, Any]], list[float]]:
    """Send requests at their times, from `start` on in seconds of time.perf_counter(), and read the answers."""
    gaps: list[float] = []
    tasks = []
    for one in asked:
        await load.until(start + one.time - load.AHEAD)  # to connect
        body = {"prompt": one.prompt, "max_tokens": one.max_tokens, "stream": True, "ignore_eos": True}
        body |= {"temperature": 0.6, "stream_options": {"include_usage": True}}
        tasks.append(asyncio.create_task(speed.request(port, body, start + one.time, gaps)))
    answers = [{**answer, "end": answer["end"] - start} for answer in await asyncio.gather(*tasks)]
    return answers, gaps


def client(port: int, asked: list[Asked], start: float) -> tuple[list[dict[str, Any]], list[float]]:
    return asyncio.run(ask(port, asked, start))


def over_http(port: int, asked: list[Asked], clients: int) -> Seen:
    """What clients in processes of their own see, who are on time."""
    with multiprocessing.get_context("spawn").Pool(clients) as pool:
        pool.map(abs, range(clients))  # they are there
        for wave in arrivals(*WARM_UP), asked:
            start = time.perf_counter() + 0.2
            parts = pool.starmap(client, [(port, wave[i::clients], start) for i in range(clients)], chunksize=1)
    found = figures([a for answers, _ in parts for a in answers], [gap for _, gaps in parts for gap in gaps])
    return Seen(found, [one.time for one in asked])


def measure_async(
    waves: list[list[list[Any]]], model: str, config: dict[str, Any], fake: dict[str, float] | None = None
) -> list[Seen]:
    """In a process of its own: the last wave. Callers share the process with the engine, which may make them late.
    fake: of a `mock.FakeExecutor` in place of the device."""
    return [asyncio.run(in_process([[Asked(*one) for one in wave] for wave in waves], model, config, fake))]


async def in_process(
    waves: list[list[Asked]], model: str, config: dict[str, Any], fake: dict[str, float] | None
) -> Seen:
    from nanovllm import AsyncLLM, SamplingParams

    async with AsyncLLM(model, skip_tokenizer_init=True, **config) as llm:
        if fake is not None:
            llm.llm.engine.executor = mock.FakeExecutor(**fake)
        for wave in waves:
            start, gaps = time.perf_counter(), list[float]()

            async def read(one: Asked, start: float, gaps: list[float]) -> dict[str, Any]:
                params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=one.max_tokens)
                first, last, tokens, sent = None, 0.0, 0, time.perf_counter() - start
                async for output in llm.generate({"prompt_token_ids": one.prompt}, params):
                    now = time.perf_counter()
                    tokens += len(output.outputs[0].token_ids)
                    if first is None:
                        first = now - start - sent
                    else:
                        gaps.append(now - last)
                    last = now
                told = {"tokens": tokens, "first": first, "finished": tokens == one.max_tokens, "sent": sent}
                return {**told, "end": last - start}

            tasks = []
            for one in wave:
                await asyncio.sleep(start + one.time - time.perf_counter())
                tasks.append(asyncio.create_task(read(one, start, gaps)))
            answers = list(await asyncio.gather(*tasks))
    return Seen(figures(answers, gaps), [answer["sent"] for answer in answers])


class BusyClock:
    """Seconds that this thread has computed for, and those that it would have waited for: what a stopwatch shows on a
    machine that does nothing else."""

    def __init__(self) -> None:
        self._offset = -time.process_time()

    def __call__(self) -> float:
        return time.process_time() + self._offset

    def skip_to(self, when: float) -> None:
        self._offset += max(0.0, when - self())


def measure_engine(waves: list[list[list[Any]]], model: str, config: dict[str, Any]) -> list[Seen]:
    """In a process of its own, with one thread: the engine's own loop. Nobody waits for a request to come."""
    from nanovllm import LLM, SamplingParams

    core = LLM(model, skip_tokenizer_init=True, **config).engine
    for wave in waves:
        clock, gaps = BusyClock(), list[float]()
        coming = [Asked(*one) for one in wave]
        answers: list[dict[str, Any]] = [{"tokens": 0, "first": None, "finished": False, "end": 0.0} for _ in coming]
        sent = 0
        while sent < len(coming) or core.has_unfinished():
            while sent < len(coming) and coming[sent].time <= clock():
                params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=coming[sent].max_tokens)
                core.add_request(str(sent), coming[sent].prompt, params)
                sent += 1
            if not core.has_unfinished():
                clock.skip_to(coming[sent].time)
                continue
            committed, _ = core.advance()
            now = clock()
            for seq, token_ids, _ in committed:
                number = int(seq.request_id)
                answer = answers[number]
                if answer["first"] is None:
                    answer["first"] = now - coming[number].time
                else:
                    gaps.append(now - answer["end"])
                answer["tokens"] += len(token_ids)
                answer["end"], answer["finished"] = now, seq.finish_reason is not None
    return [Seen(figures(answers, gaps), [one.time for one in coming])]
