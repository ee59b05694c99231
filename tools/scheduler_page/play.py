"""A run of the real scheduler without a model: what it decided at every tick, why, and how things stood then.

Runs in the browser as well as here, so it needs nothing but the control plane. A tick is one step, or the time of one
in which nobody is there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from itertools import count
from types import ModuleType
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.plan import StepPlan, StepResult
from nanovllm.sampling_params import SamplingParams
from nanovllm.trace_view.engine_state import EngineState, Event
from tools.scheduler_page.reasons import Narrator

MOST_TICKS = 400
ROOM = 1000  # token ids for the prompt of one request
VOCABULARY = 10**9


@dataclass(frozen=True)
class Request:
    name: str  # a capital letter
    arrival: int  # the tick in which it is added
    prompt: int  # tokens
    output: int  # tokens
    priority: int = 0  # the smaller goes first
    shared: int = 0  # of the prompt's tokens, how many are the beginning that requests have in common


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the reader may choose."""

    requests: tuple[Request, ...]
    num_blocks: int
    block_size: int
    seats: int  # max_num_seqs
    budget: int  # max_num_batched_tokens
    prefix_cache: bool = True
    chunks: bool = True
    static: bool = False  # a batch starts when the one before is over, and nobody joins it

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Setup:
        """From JSON or TOML, where other keys may stand beside these."""
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        return cls(**known | {"requests": tuple(Request(**request) for request in values["requests"])})

    def prompt_ids(self, request: Request) -> list[int]:
        """The first `shared` are equal in all requests, the others are the request's own."""
        shared = min(request.shared, request.prompt)
        own = ROOM * (1 + self.requests.index(request))
        return [*range(1, shared + 1), *range(own + shared, own + request.prompt)]


class NoModel:
    """An executor whose every token is one that nobody had before."""

    def __init__(self, planned: Callable[[], None]) -> None:
        self.planned = planned
        self.tokens = count(VOCABULARY // 2)

    def add(self, *_: Any) -> None: ...

    def remove(self, key: int) -> None: ...

    def submit(self, plan: StepPlan) -> NoModel:
        self.planned()
        self.sampled: dict[int, Any] = {s.key: ([next(self.tokens)], None) for s in plan.scheduled if s.sample}
        return self

    def result(self) -> StepResult:
        return StepResult(self.sampled)

    def close(self) -> None: ...


class EngineRig:
    """The package's engine, stepped by hand."""

    def __init__(self, setup: Setup, tell: Callable[[Event], None], planned: Callable[[], None]) -> None:
        config = EngineConfig(
            num_kv_blocks=setup.num_blocks,
            kvcache_block_size=setup.block_size,
            max_num_seqs=setup.seats,
            max_num_batched_tokens=setup.budget,
            max_model_len=ROOM,
            enable_prefix_caching=setup.prefix_cache,
            enable_chunked_prefill=setup.chunks,
            async_scheduling=False,
        )
        self.setup = setup
        no_model: Any = NoModel(planned)  # neither guesses nor masks
        self.engine = LLMEngine(no_model, config, vocab_size=VOCABULARY, on_event=tell)
        self.scheduler: Any = self.engine.scheduler
        self.blocks: Any = self.scheduler.blocks
        self.free: Collection[int] = self.blocks.free
        self.names: dict[Any, str] = {}  # of the sequences

    def add(self, request: Request) -> None:
        """Raises ValueError for a request that could never run."""
        params = SamplingParams(max_tokens=request.output, ignore_eos=True, seed=0)
        self.engine.add_request(request.name, self.setup.prompt_ids(request), params, priority=request.priority)
        self.names[next(reversed(self.scheduler.sequences.values()))] = request.name

    def step(self) -> None:
        self.engine.step()


class StageRig:
    """The scheduler of stage 5, ours or the reader's, from its module."""

    def __init__(
        self, module: ModuleType | Any, setup: Setup, tell: Callable[[Event], None], planned: Callable[[], None]
    ) -> None:
        from stages import core  # which brings torch along, where there is one

        self.core, self.setup, self.planned, self.tokens = core, setup, planned, count(VOCABULARY // 2)

        def named(event: Event) -> None:
            told = event | {"request": list(self.names.values())[event["request"]]}
            if event["type"] == "preempted" and self.asks:
                name, needs = self.asks[-1]
                told |= {"by": [name, 0], "needs": needs, "free": len(self.free)}
            tell(told)

        self.trace = core.Trace(named)
        self.blocks: Any = module.PrefixCachingPool(setup.num_blocks, setup.block_size)
        self.scheduler: Any = module.Scheduler(self.blocks, setup.seats, setup.budget, self.trace)
        self.free: Collection[int] = self.blocks.free_list
        self.names: dict[Any, str] = {}
        self.asks: list[tuple[str, int]] = []  # for whom the scheduler makes room at the moment, and how many blocks
        self._watch_make_room()

    def add(self, request: Request) -> None:
        """Raises ValueError for a request that could never run."""
        params = self.core.SamplingParams(max_tokens=request.output, ignore_eos=True)
        number, token_ids = len(self.names), self.setup.prompt_ids(request)  # a stage numbers them as they arrive
        seq = self.core.Sequence(number, token_ids, request.prompt, params, seed=0)
        self.blocks.check_fits(seq)
        self.names[seq] = request.name
        self.trace.emit("added", number, prompt_tokens=request.prompt)
        self.scheduler.add(seq)

    def step(self) -> None:
        waiting = len(self.scheduler.waiting) + len(self.scheduler.running)
        plan = self.scheduler.schedule()
        if waiting and not plan:
            raise RuntimeError(f"schedule() planned nothing, though {waiting} sequences are there")
        self.planned()
        tokens = [next(self.tokens) for s in plan if s.sample]
        self.scheduler.commit(plan, tokens, frozenset())

    def _watch_make_room(self) -> None:
        """Keep in `asks` for whom `make_room` works: a stage's events do not tell who needed what a victim gave."""
        real = getattr(self.scheduler, "make_room", None)
        if real is None:  # the reader may do without
            return

        def watched(seq: Any, num_tokens: Any) -> Any:
            needs = self.blocks.num_blocks_for(num_tokens) - len(seq.block_table)
            self.asks.append((self.names[seq], needs))
            try:
                return real(seq, num_tokens)
            finally:
                self.asks.pop()

        self.scheduler.make_room = watched


def play(setup: Setup, module: Any = None, told: Callable[[Exception], str] = str) -> dict[str, Any]:
    """What the page draws: of every tick the sentences and the state while its step runs, and totals of the run.

    module: a stage 5 whose scheduler decides in place of the engine's. What it raises ends the run, and is in it in the
    words of `told`.
    """
    run = Run(setup, module)
    error = None
    try:
        run.to_the_end()
    except Exception as raised:  # of the reader's code: anything
        if module is None:
            raise
        error = told(raised)
        run.fail(error)
    return {"frames": run.frames, "events": run.events, "totals": run.totals(), "error": error}


class Run:
    """A run in the making."""

    def __init__(self, setup: Setup, module: Any = None) -> None:
        self.setup = setup
        self.frames: list[dict[str, Any]] = []
        self.events: list[Event] = []  # each with its tick in place of the time
        self.state = EngineState()
        self.rig: Any = (
            EngineRig(setup, self.hear, self.look) if module is None else StageRig(module, setup, self.hear, self.look)
        )
        self.narrator = Narrator(setup, self.rig, self.state)
        self.to_come = sorted(setup.requests, key=lambda request: request.arrival)
        self.held: list[Request] = []  # arrived, but a static batch runs
        self.shares: dict[str, list[Any]] = {}  # of the step: phase, tokens, tokens before them, how many are again
        self.looked = False

    def to_the_end(self) -> None:
        """Tick by tick, until nobody is left."""
        while self.to_come or self.held or self.names("waiting") or self.names("running"):
            if len(self.frames) == MOST_TICKS:
                self.note("error", f"The page stops after {MOST_TICKS} ticks.")
                return
            self.frames.append({"why": [], "after": []})
            self.shares, self.looked = {}, False
            self.arrive()
            self.rig.step()
            self.look()

    def arrive(self) -> None:
        """Add those whose time has come: at once, or as a batch when the one before is over."""
        now = len(self.frames) - 1
        while self.to_come and self.to_come[0].arrival <= now:
            self.held.append(self.to_come.pop(0))
            self.note("arrival", self.narrator.arrival(self.held[-1]))
        if self.setup.static and (self.names("running") or self.names("waiting")):
            return
        slots = self.setup.num_blocks * self.setup.block_size
        seats = self.setup.seats if self.setup.static else len(self.held)
        while self.held and seats:
            request = self.held[0]
            # A static batch reserves blocks for whole outputs, as stage 4 does; the last token needs no slot.
            needs = -(-(request.prompt + request.output - 1) // self.setup.block_size) * self.setup.block_size
            if self.setup.static and slots < needs and self.names("waiting"):
                break
            del self.held[0]
            try:
                self.rig.add(request)
                slots, seats = slots - needs, seats - 1
            except ValueError as refusal:
                self.note("refused", f"{request.name} is refused: {refusal}.")

    def hear(self, event: Event) -> None:
        event = {name: value for name, value in event.items() if name not in ("t", "choice")}
        self.events.append({"tick": len(self.frames) - 1} | event)
        before = list(self.state.computed)
        i = self.state.hear(event)
        if event["type"] == "scheduled":
            start, tokens = event["cached"], event["tokens"]
            again = max(0, min(before[i], start + tokens) - start)
            self.shares[event["request"]] = [self.state.phases[i], tokens, start, again]
        for kind, sentence in self.narrator.hear(event, i):
            self.note(kind, sentence)

    def look(self) -> None:
        """Write down how things stand: between schedule and commit, or after a step in which nothing ran."""
        if self.looked:
            return
        for kind, sentence in self.narrator.plan(self.shares, [request.name for request in self.held]):
            self.note(kind, sentence)
        self.looked = True
        blocks, names = self.rig.blocks, self.state.names
        self.frames[-1] |= {
            "waiting": self.names("waiting"),
            "running": self.names("running"),
            "held": [request.name for request in self.held],
            "shares": self.shares,
            "known": {name: len(seq.token_ids) for seq, name in self.rig.names.items()},
            "tables": {names[i][0]: list(table) for i, table in self.state.tables.items()},
            "writers": {block: names[i][0] for block, i in self.state.writers.items()},
            "free": list(self.rig.free),
            "findable": [block for block, content in enumerate(blocks.contents) if content is not None],
        }

    def fail(self, error: str) -> None:
        """The last frame is of a step that did not come to its end, so it shows what the one before showed."""
        frame: dict[str, Any] = {key: [] for key in ("waiting", "running", "held", "findable")}
        frame["free"] = list(range(self.setup.num_blocks))
        frame |= {key: {} for key in ("shares", "known", "tables", "writers")}
        before = self.frames[-2] if len(self.frames) > 1 else {}
        self.frames[-1] = frame | before | self.frames[-1]
        self.note("error", error)

    def note(self, kind: str, sentence: str) -> None:
        self.frames[-1]["after" if self.looked else "why"].append([kind, sentence])

    def names(self, queue: str) -> list[str]:
        return [self.rig.names[seq] for seq in getattr(self.rig.scheduler, queue)]

    def totals(self) -> dict[str, Any]:
        """Counts over the run; first: the ticks that each request waited for its first token."""

        def events(kind: str) -> list[Event]:
            return [event for event in self.events if event["type"] == kind]

        first: dict[str, int] = {}
        arrivals = {request.name: request.arrival for request in self.setup.requests}
        for event in events("token"):
            first.setdefault(event["request"], event["tick"] - arrivals[event["request"]] + 1)
        return {
            "steps": len({event["tick"] for event in events("scheduled")}),
            "tokens": len(events("token")),
            "preemptions": len(events("preempted")),
            "again": sum(share[3] for frame in self.frames for share in frame.get("shares", {}).values()),
            "cached": sum(event["cached"] for event in events("admitted")),
            "first": first,
        }
