"""Scenes on a running engine, whose steps are timed: decodes, chunks of prompts, both, guesses, structured outputs.

Every step is planned by the scheduler and computed by the real executor. A step takes from the end of the one before,
or from its own submission if that is later, until its result is there. On a GPU that is measured with asynchronous
scheduling, where the host's work is hidden, and again without: the difference is the host's time. On a CPU, which
overlaps nothing, the host's time is what lies between a result and the next submission.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, cycle, product
from typing import Any, NamedTuple, Self

from benchmarks.lib.process import CLOCKS, ClockName, Engine, random_prompts
from nanovllm.engine.plan import StepHandle, StepPlan, StepResult
from nanovllm.simulate.step_shape import StepShape, shape_of
from nanovllm.structured_outputs import StructuredOutputsParams
from nanovllm.text.grammars import TokenGrammars
from nanovllm.text.tokenizer import Tokenizer

DECODES = {"batches": [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512], "contexts": [128, 512, 2048, 8192]}
CHUNKS = {"sizes": [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384], "contexts": [0, 2048, 8192, 15_872]}
MIXED = {"batches": [8, 32, 60, 128, 255], "sizes": [64, 512, 2048, 8192], "context": 512}
SHARED = {"beginnings": [2048, 8192], "numbers": [1, 4], "batches": [8, 32, 128, 256], "prompts": [8, 32], "own": 128}
GRID: dict[str, Any] = {
    "decodes": DECODES,
    "chunks": CHUNKS,
    "prompts": [1, 2, 8, 32, 128],  # in a step, of all `sizes` that they can share
    "mixed": MIXED,
    "shared": SHARED,
    "masked": [1, 8, 64],
    "guesses": {"batches": [1, 8, 32, 64], "numbers": [1, 3, 7], "context": 512},
    "calls": [1, 8, 32],
    "steps": 12,
    "pauses": 12,
    "most_tokens": 2**19,  # of all sequences of a batch together
    "highest_id": 10_000,
}
QUICK_GRID: dict[str, Any] = {
    "decodes": {"batches": [1, 2, 4, 8, 16, 32, 64], "contexts": [16, 128, 512]},
    "chunks": {"sizes": [16, 64, 128, 256, 512, 1024], "contexts": [0, 512]},
    "prompts": [1, 2, 8],
    "mixed": {"batches": [2, 8, 16], "sizes": [16, 64, 256], "context": 64},
    "shared": {"beginnings": [256], "numbers": [1, 2], "batches": [4, 16], "prompts": [4], "own": 32},
    "masked": [1, 4],
    "guesses": {"batches": [1, 4], "numbers": [1, 3], "context": 64},
    "calls": [1, 8],
    "steps": 5,
    "pauses": 3,
    "most_tokens": 2**13,
    "highest_id": 500,
}
GRAMMAR = r"[a-z ]{300,400}"
PAUSE = 0.1  # seconds


class Step(NamedTuple):
    shape: StepShape
    device: float  # seconds
    host: float  # seconds between the result before and this submission; below 0 if the submission came first


class Meter:
    """Times an engine's steps as they are submitted and committed."""

    def __init__(self, core: Any, clock: ClockName) -> None:
        self._now = CLOCKS[clock]
        self._scheduler = core.scheduler
        self.steps: list[Step] = []
        self._submit, self._commit = core.executor.submit, core.scheduler.commit
        self._submitted: dict[int, tuple[float, StepShape]] = {}
        self._last = 0.0
        core.executor.submit, core.scheduler.commit = self.submit, self.commit

    def submit(self, plan: StepPlan) -> StepHandle:
        self._submitted[plan.step] = self._now(), shape_of(plan, self._scheduler)
        handle: StepHandle = self._submit(plan)
        return handle

    def commit(self, plan: StepPlan, result: StepResult) -> Any:
        now = self._now()
        begun, shape = self._submitted.pop(plan.step)
        self.steps.append(Step(shape, now - max(begun, self._last), begun - self._last))
        self._last = now
        return self._commit(plan, result)


class Bench:
    """Scenes on one engine; each leaves it empty. A scene yields points: {"name", "shape", "device", "host"}."""

    def __init__(self, engine: Engine, grid: dict[str, Any], overlapped: bool, clock: ClockName) -> None:
        self.engine, self.grid, self.overlapped = engine, grid, overlapped
        self.core = engine.llm.engine
        self.meter = Meter(self.core, clock)
        self.default = self.core.scheduler.config
        self.longest, self.seats = self.default.max_model_len, self.default.max_num_seqs
        self.pool = min(grid["most_tokens"], self.default.num_kv_blocks * self.default.kvcache_block_size)
        self._ids, self._seeds = count(), count()
        self._now = CLOCKS[clock]
        self.intake: list[tuple[int, int, float]] = []  # requests, tokens of their prompts, seconds of adding them

    def add(self, lengths: list[int], max_tokens: int, behind: Sequence[list[int]] = ([],), **more: Any) -> None:
        """Prompts that have so many tokens of their own, each behind one of these beginnings in turn."""
        params = self.engine.make_params(**{"temperature": 0.6, "ignore_eos": True, "max_tokens": max_tokens} | more)
        draw, ids = random.Random(next(self._seeds)), range(self.grid["highest_id"])
        prompts = [before + draw.choices(ids, k=length) for before, length in zip(cycle(behind), lengths, strict=False)]
        start = self._now()
        for prompt in prompts:
            self.core.add_request(str(next(self._ids)), prompt, params)
        self.intake.append((len(lengths), sum(map(len, prompts)), self._now() - start))

    def budget(self, tokens: int | None = None) -> None:
        """Tokens of a step from now on; the engine's own without a number."""
        most = self.default.max_num_batched_tokens
        self.core.scheduler.config = replace(self.default, max_num_batched_tokens=min(tokens or most, most))

    def overlap(self, wanted: bool) -> None:
        self.core.config = replace(self.core.config, async_scheduling=wanted)

    def advance(self, steps: int) -> list[Step]:
        """The steps that end in so many turns."""
        self.meter.steps = []
        for _ in range(steps):
            if self.core.has_unfinished():
                self.core.advance()
        return self.meter.steps

    def until_all_decode(self, number: int) -> None:
        while not (steps := self.advance(1)) or steps[-1].shape.decodes < number or steps[-1].shape.prompts:
            pass

    def clear(self) -> None:
        self.core.abort_all()
        self.budget()

    def drain(self) -> None:
        while self.core.has_unfinished():
            self.core.advance()

    def seconds_for(self, lengths: list[int]) -> float:
        """Seconds from adding prompts until each has one token. The prompts are not counted in the intake."""
        self.add(lengths, 1)
        start = self._now()
        self.drain()
        return self._now() - start + self.intake.pop()[-1]

    def steady(self, name: str, keeps: Any = None) -> Iterator[dict[str, Any]]:
        """The running decodes, as a point with the median time; overlapped and not, where both can be."""
        steps = self.grid["steps"]
        self.overlap(self.overlapped)
        found = [s for s in self.advance(steps + 2)[2:] if keeps is None or keeps(s.shape)]
        single = found
        if self.overlapped:
            self.overlap(False)
            single = [s for s in self.advance(steps + 2)[2:] if keeps is None or keeps(s.shape)]
        if found and single:
            device = statistics.median(s.device for s in found)
            host = statistics.median(s.host for s in single)
            if self.overlapped:
                host = statistics.median(s.device + s.host for s in single) - device
            yield {"name": name, "shape": mean_shape(found), "device": device, "host": max(0.0, host)}

    def decodes(self) -> Iterator[dict[str, Any]]:
        grid, room = self.grid["decodes"], 4 * self.grid["steps"] + 8
        for batch in grid["batches"]:
            for context in grid["contexts"]:
                lengths = spread(batch, context)
                if (
                    batch * (context + room) <= self.pool
                    and max(lengths) + room <= self.longest
                    and batch <= self.seats
                ):
                    self.add(lengths, self.longest - max(lengths))
                    self.until_all_decode(batch)
                    yield from self.steady(f"{batch} decodes at {context}")
                    self.clear()

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Chunks of one prompt behind a context; and whole prompts, several in a step."""
        for size in self.grid["chunks"]["sizes"]:
            for context in self.grid["chunks"]["contexts"]:
                number = min(3, (self.longest - 1 - context) // size)
                if number and size <= self.default.max_num_batched_tokens:
                    scene = partial(self.one_after_another, size, context, number)
                    yield from self.twice(f"chunks of {size} behind {context}", scene)
            for prompts in self.grid["prompts"]:
                length = size // prompts
                if length >= 8 and 2 * length < self.longest and prompts <= self.seats and 3 * size <= self.pool:
                    yield from self.twice(f"{prompts} prompts of {length}", partial(self.several, prompts, length))

    def one_after_another(self, size: int, context: int, number: int) -> list[Step]:
        self.add([context + number * size], 1)
        while context > 0 and (left := context - self.computed()) > 0:
            self.budget(left)
            self.advance(1)
        self.budget(size)
        return [s for s in self.advance(number + 2) if s.shape.prompt_tokens == size][-number:]

    def computed(self) -> int:
        """Tokens of the first running sequence whose KV exists or is on its way."""
        running = self.core.scheduler.running
        return running[0].num_computed if running else 0

    def several(self, prompts: int, length: int, shared: int = 0) -> list[Step]:
        self.add(3 * spread(prompts, length), 1, self.beginnings(1, shared))
        self.budget(sum(spread(prompts, length)))
        return [s for s in self.advance(5) if s.shape.prompts == prompts]

    def beginnings(self, number: int, length: int) -> list[list[int]]:
        """`number` beginnings of prompts. The prefix cache holds them from now on, until `clear`."""
        draw, ids = random.Random(-1 - next(self._seeds)), range(self.grid["highest_id"])
        found = [draw.choices(ids, k=length) for _ in range(number)]
        if length:
            self.add([1] * number, 1, found)
            self.drain()
        return found

    def shared(self) -> Iterator[dict[str, Any]]:
        """Decodes, and prompts, behind long beginnings that several of them share. If a beginning ends within a block,
        each sequence computes the tokens in that block anew."""
        grid, room = self.grid["shared"], 4 * self.grid["steps"] + 8
        own = grid["own"]
        for length in grid["beginnings"]:
            longest = length + max(spread(max(grid["batches"]), own)) + room
            for batch, number in product(grid["batches"], grid["numbers"]):
                held = number * length + batch * (own + room)
                if number <= batch <= self.seats and held <= self.pool and longest <= self.longest:
                    self.add(spread(batch, own), self.longest - longest, self.beginnings(number, length))
                    self.until_all_decode(batch)
                    yield from self.steady(f"{batch} decodes behind {number} beginnings of {length}")
                    self.clear()
            for prompts in grid["prompts"]:
                if 3 * prompts * own + length <= self.pool and longest <= self.longest and prompts <= self.seats:
                    name = f"{prompts} prompts of {own} behind a shared {length}"
                    yield from self.twice(name, partial(self.several, prompts, own, length))

    def mixed(self) -> Iterator[dict[str, Any]]:
        """A chunk of a prompt beside decodes."""
        grid = self.grid["mixed"]
        for batch in grid["batches"]:
            for size in grid["sizes"]:
                number = min(3, (self.longest - 1) // size)
                room = batch * (grid["context"] + 64) + number * size
                if number and room <= self.pool and batch < self.seats:
                    scene = partial(self.beside_decodes, batch, grid["context"], size, number)
                    yield from self.twice(f"{batch} decodes beside chunks of {size}", scene)

    def beside_decodes(self, batch: int, context: int, size: int, number: int) -> list[Step]:
        self.add(spread(batch, context), 64)
        self.until_all_decode(batch)
        self.add([number * size], 1)
        self.budget(batch + size)
        return [s for s in self.advance(number + 2) if s.shape.prompts]

    def twice(self, name: str, scene: Callable[[], list[Step]]) -> Iterator[dict[str, Any]]:
        """The steps of a scene as points: overlapped, and again by themselves (or only these, on a CPU). The first of
        several steps did not follow on another."""
        found = []
        for overlapped in dict.fromkeys((self.overlapped, False)):
            self.overlap(overlapped)
            found.append(scene())
            self.clear()
        first, single = found[0], found[-1]
        for number, (step, alone) in enumerate(zip(first, single, strict=False)):
            if number or len(first) == 1:
                host = alone.host if first is single else alone.device + max(0.0, alone.host) - step.device
                host_known = number and (step.shape == alone.shape)
                known = {"host": max(0.0, host)} if host_known else {"host": None}
                yield {"name": f"{name}, {number}", "shape": list(step.shape), "device": step.device, **known}

    def masked(self) -> Iterator[dict[str, Any]]:
        """Decodes with structured outputs: by a real grammar where there is a tokenizer, else by one that allows
        everything, so that filling masks takes no time."""
        if (self.engine.llm.path / "tokenizer.json").is_file():
            tokenizer, eos = Tokenizer(self.engine.llm.path), self.core.eos_token_ids
            self.core.grammars = TokenGrammars(tokenizer, self.core.vocab_size, eos)
        else:
            self.core.grammars = Anything()
        for batch in self.grid["masked"]:
            self.add([64] * batch, 100, ignore_eos=False, structured_outputs=StructuredOutputsParams(regex=GRAMMAR))
            self.intake.pop()  # the first one has compiled the grammar
            self.until_all_decode(batch)
            yield from self.steady(f"{batch} masked decodes", lambda shape, batch=batch: shape.masked == batch)
            self.clear()

    def wake(self) -> float:
        """Seconds by which a lone prompt takes longer after a pause than right behind another prompt. A processor that
        has been idle is slow at first."""
        found = []
        for pause in 0.0, PAUSE:
            seconds = []
            for _ in range(self.grid["pauses"]):
                time.sleep(pause)
                seconds.append(self.seconds_for([200]))
            found.append(statistics.median(seconds))
        return max(0.0, found[1] - found[0])

    def calls(self) -> list[tuple[int, float, float]]:
        """Of calls of `LLM.generate` for one token per request: the number of requests, the seconds of the call beyond
        adding these requests and computing their steps, and all its seconds."""
        self.overlap(self.overlapped)
        found = []
        for number in self.grid["calls"]:
            whole, own = [], []
            for _ in range(self.grid["pauses"]):
                prompts = random_prompts([64] * number, -1 - next(self._seeds), self.grid["highest_id"])
                start = self._now()
                self.engine.generate(prompts, [1] * number)
                whole.append(self._now() - start)
                own.append(self.seconds_for([64] * number))
            seconds = statistics.median(whole)
            found.append((number, max(0.0, seconds - statistics.median(own)), seconds))
        return found

    def guesses(self) -> Iterator[dict[str, Any]]:
        """Verification of guesses, whatever they are."""
        grid, scheduler = self.grid["guesses"], self.core.scheduler
        for batch in grid["batches"]:
            for number in grid["numbers"]:
                scheduler.max_guesses, scheduler.proposer = number, AnyGuesses()
                self.add(spread(batch, grid["context"]), 400)
                self.until_all_decode(batch)
                yield from self.steady(f"{batch} decodes with {number} guesses each")
                self.clear()


def spread(number: int, mean: int) -> list[int]:
    """Lengths as different as in traffic, from a quarter of the mean to seven quarters of it."""
    return [max(1, round(mean * (0.25 + 1.5 * (i + 0.5) / number))) for i in range(number)]


class Anything:
    """`Grammars`, and the matcher of any output, that forbid nothing."""

    def compile(self, params: StructuredOutputsParams) -> Self:
        return self

    def copy(self) -> Self:
        return self

    def accept(self, token_id: int) -> str | None:
        return None

    def num_valid(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def fill(self, wanted: Sequence[tuple[Any, Sequence[int]]], masks: Any) -> None:
        masks.fill(-1)


class AnyGuesses:
    def propose(self, seq: Any, k: int) -> list[int | None]:
        return [1] * k


def mean_shape(steps: list[Step]) -> list[int]:
    """Of steps that are alike but for their keys."""
    return [round(statistics.mean(column)) for column in zip(*(s.shape for s in steps), strict=True)]


def measure(
    engine: Engine, repeats: int, grid: dict[str, Any], scenes: list[str], overlapped: bool, clock: ClockName
) -> list[Any]:
    """In the process of the engine: of each repetition the points, the intake, `calls` and `wake`, and the KV cache's
    size in tokens."""
    bench = Bench(engine, grid, overlapped, clock)
    kv_tokens = bench.default.num_kv_blocks * bench.default.kvcache_block_size
    repetitions = []
    for repeat in range(-1, repeats):  # the first is for warming up: kernels are compiled for the sizes of steps
        found = [point for scene in scenes for point in getattr(bench, scene)()]
        if repeat >= 0:
            told = {"intake": bench.intake, "calls": bench.calls(), "wake": bench.wake()}
            repetitions.append({"points": found, "kv_tokens": kv_tokens, **told})
        bench.intake = []
    return repetitions
