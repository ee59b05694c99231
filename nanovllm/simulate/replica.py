"""One replica: the real engine, with its scheduler, blocks and prefix cache, over an executor that computes nothing.

The executor knows how long a step would take, and sets the engine's clock forward by so much. All that a real engine
decides is decided here by the same code: who joins a step, who waits, who is preempted, which block is found.
"""

import random
from collections.abc import KeysView, Sequence
from functools import lru_cache

from nanovllm.admission import check_queue
from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.guesses import DraftModelProposer
from nanovllm.engine.plan import StepMasks, StepPlan, StepResult
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence as EngineSequence
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.simulate.arrivals import Query
from nanovllm.simulate.costs import IntakeTime, ServerTime, StepCosts, shape_of
from nanovllm.simulate.histogram import Histogram

Tokens = dict[int, tuple[list[int], None]]  # what a step sampled for each sequence, by key
NO_SERVER = ServerTime()  # the engine is called directly
NO_INTAKE = IntakeTime()  # taking in a query costs nothing


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def wait_until(self, time: float) -> None:
        """Nothing happens if that is over."""
        self.now = max(self.now, time)


class SimulatedExecutor:
    """Steps take their time one after the other, as on a device; what they sample is known at once.

    host_token, host_step: seconds of the host per token that is drawn and per step, beside those of `costs`.
    acceptance: the probability that a guess is right if all before it are.

    The host's time passes while a step is submitted. A step begins when it has been submitted, and the step before is
    over. So with asynchronous scheduling a step takes the longer one of host and device, and without it their sum.
    """

    def __init__(
        self,
        costs: StepCosts,
        clock: VirtualClock,
        host_token: float,
        acceptance: float,
        draw: random.Random,
        host_step: float = 0.0,
    ) -> None:
        self.costs = costs
        self.clock = clock
        self.host_token = host_token
        self.host_step = host_step
        self.acceptance = acceptance
        self.draw = draw
        self.scheduler: Scheduler | None = None  # the engine's, which knows which keys are shared; without it none are
        self.added = -1  # key of the sequence that was added last
        self.removed: list[int] = []  # keys of sequences that are over; whoever reads them clears the list
        self.delivered: Tokens = {}  # by the step that was collected last
        self.busy_seconds = 0.0  # of the device, of all steps
        self.num_steps = 0
        self._free = 0.0  # when the device has done all that was submitted

    def add(self, key: int, token_ids: Sequence[int], params: SamplingParams) -> None:
        self.added = key

    def remove(self, key: int) -> None:
        self.removed.append(key)

    def close(self) -> None: ...

    def submit(self, plan: StepPlan) -> "SimulatedStep":
        shape = shape_of(plan, self.scheduler)
        seconds = self.costs.device_seconds(shape)
        self.clock.now += self.costs.host_seconds(shape) + self.host_step + self.host_token * shape.samples
        self._free = max(self._free, self.clock.now) + seconds
        self.busy_seconds += seconds
        self.num_steps += 1
        # Any token will do, and all sequences of a step may share a list that nobody changes. No two steps have the
        # same token for long, so that no text looks like another's.
        token = self.num_steps % 251
        if shape.guesses:
            right = {s.key: self._num_right(len(s.guesses)) for s in plan.scheduled if s.sample}
            tokens: Tokens = {key: ([token] * (1 + number), None) for key, number in right.items()}
        else:
            tokens = dict.fromkeys([s[0] for s in plan.scheduled if s[4]], ([token], None))
        return SimulatedStep(self, self._free, tokens)

    def _num_right(self, num_guesses: int) -> int:
        for count in range(num_guesses):
            if self.draw.random() >= self.acceptance:
                return count
        return num_guesses


class SimulatedStep:
    """A step that was submitted, and when it will be over."""

    __slots__ = "due", "executor", "tokens"

    def __init__(self, executor: SimulatedExecutor, due: float, tokens: Tokens) -> None:
        self.executor = executor
        self.due = due
        self.tokens = tokens

    def guesses(self) -> dict[int, list[int]]:
        return {}

    def draw(self, masks: StepMasks) -> None: ...

    def result(self) -> StepResult:
        self.executor.clock.wait_until(self.due)
        self.executor.delivered = self.tokens
        return StepResult(self.tokens)  # type: ignore[arg-type]  # a dict of None is one of optional log-probabilities


class Job:
    """A query on a replica."""

    __slots__ = "finished_time", "first_token_time", "last_token_time", "num_delivered", "query", "seq"

    def __init__(self, query: Query, seq: EngineSequence) -> None:
        self.query = query
        self.seq = seq
        self.first_token_time: float | None = None
        self.last_token_time = 0.0  # kept while turns bring no token; else the token came in the replica's last turn
        # Set at the end.
        self.finished_time = 0.0
        self.num_delivered = 0  # tokens that the client got


class Replica:
    """An engine in virtual time, and what a router may know of it.

    `begin_turn` runs a turn of the step loop, and says when that turn will be over. `end_turn` belongs there: what the
    turn brings is known to nobody before.
    """

    def __init__(
        self,
        number: int,
        config: EngineConfig,
        costs: StepCosts,
        *,
        vocab_size: int,
        max_queue: int | None = None,
        intake: IntakeTime = NO_INTAKE,
        server: ServerTime = NO_SERVER,
        acceptance: float = 0.0,
        seed: int = 0,
    ) -> None:
        """`config` is resolved, `num_kv_blocks` included. `intake` is the host's time for a query, in the turn that
        takes the query in. `server` is what HTTP adds to the engine's own time."""
        self.number = number
        self.config = config
        self.max_queue = max_queue
        self.intake = intake
        self.server = server
        self.clock = VirtualClock()
        draw = random.Random(f"{seed} {number}")
        self.executor = SimulatedExecutor(costs, self.clock, server.engine_token, acceptance, draw, server.engine_step)
        self.engine = LLMEngine(self.executor, config, vocab_size=vocab_size, clock=self.clock)
        self.executor.scheduler = self.engine.scheduler
        if self.engine.scheduler.proposer is not None:  # the text is random, and has no n-gram twice
            self.engine.scheduler.proposer = DraftModelProposer()
        self.in_turn = False
        self.awake = False  # set by the fleet: a turn is in progress, or due
        self.num_ongoing = 0  # queries that came here and are not over, as far as anybody knows
        self.prompt_backlog = 0  # tokens of the prompts of those that have no token yet
        self.num_tokens = 0  # that came out, of all queries
        self.num_routed = 0  # queries that ever came here
        self._jobs: dict[int, Job] = {}  # by the sequence's key
        self._load = 0, config.max_num_seqs  # sequences that wait, and free seats: what the step loop published last
        self._num_arrived = 0  # since then
        self._to_take_in = 0.0  # seconds of the host, for those
        self._last_keys: KeysView[int] = {}.keys()  # of the sequences that got tokens in the last turn that had any
        self._last_time = 0.0  # when that turn was over
        self._num_idle_turns = 0
        self.block_seconds = 0.0  # blocks in use, summed over time
        self.most_blocks = 0
        self._blocks_before = 0  # in use when the last turn was over
        self._turn_began = 0.0

    @property
    def num_blocks_in_use(self) -> int:
        blocks = self.engine.scheduler.blocks
        return blocks.num_blocks - blocks.num_free

    def add(self, query: Query, now: float) -> None:
        """Queue a query. Raises QueueFull as the server does, and ValueError for a query that could never run."""
        waiting, free_seats = self._load
        check_queue(1, self._num_arrived + waiting, free_seats, self.config.max_num_seqs, self.max_queue)
        self.engine.add_request(str(query.number), query.prompt, params_for(query.max_tokens), arrival_time=now)
        key = self.executor.added
        self._jobs[key] = Job(query, self.engine.scheduler.sequences[key])
        self._num_arrived += 1
        self._to_take_in += self.intake.seconds(len(query.prompt))
        self.num_routed += 1
        self.num_ongoing += 1
        self.prompt_backlog += len(query.prompt)

    def begin_turn(self, now: float) -> float | None:
        """Run a turn of the step loop: take in what has come, step, commit. Returns when that will be over, in seconds;
        None if there is nothing to do."""
        engine, executor = self.engine, self.executor
        self._load, self._num_arrived = (engine.num_waiting, engine.num_free_seats), 0
        if not engine.has_unfinished():
            return None
        self._turn_began = now
        idle = max(0.0, now - self.clock.now)
        self.clock.wait_until(now)
        self.clock.now += self._to_take_in + self.intake.wake_seconds(idle)
        self._to_take_in = 0.0
        num_steps, executor.delivered = executor.num_steps, {}
        engine.advance()
        self.in_turn = True
        self._num_idle_turns = 0 if executor.delivered or executor.num_steps > num_steps else self._num_idle_turns + 1
        assert self._num_idle_turns < 3, "the engine stands still: it has requests, and neither plans nor commits"
        return self.clock.now

    def end_turn(self, now: float, gaps: Histogram) -> list[Job]:
        """Take note of what the turn brought; returns the jobs that are over. Times between tokens go to `gaps`."""
        self.in_turn = False
        # Who is finished at the end of a turn held blocks until then; who joined in it holds them now.
        in_use = max(self._blocks_before, self.num_blocks_in_use)
        self._blocks_before = self.num_blocks_in_use
        self.block_seconds += in_use * (now - self._turn_began)
        self.most_blocks = max(self.most_blocks, in_use)
        delivered = self.executor.delivered
        if delivered:
            self._note_tokens(delivered, now, gaps)
        done = [self._jobs.pop(key) for key in self.executor.removed]
        for job in done:
            job.num_delivered = job.seq.num_output_tokens
            job.finished_time = now + self._delay(delivered)
        self.executor.removed.clear()
        self.num_ongoing -= len(done)
        return done

    def _note_tokens(self, delivered: Tokens, now: float, gaps: Histogram) -> None:
        """Nearly all sequences of a turn were in the turn before as well: those are counted together."""
        keys, before = delivered.keys(), self._last_keys
        both = keys & before
        gaps.add(now - self._last_time, len(both))
        if len(both) < len(before):
            for key in before - both:
                if key in self._jobs:
                    self._jobs[key].last_token_time = self._last_time
        if len(both) < len(keys):
            for key in keys - both:
                job = self._jobs[key]
                if job.first_token_time is None:
                    job.first_token_time = now + self._delay(delivered)
                    self.prompt_backlog -= len(job.query.prompt)
                else:
                    gaps.add(now - job.last_token_time)
        self.num_tokens += sum(len(ids) for ids, _ in delivered.values()) if self.speculates else len(delivered)
        self._last_keys, self._last_time = keys, now

    def _delay(self, delivered: Tokens) -> float:
        """From the end of a step to the client: an API process sends the step's tokens one after the other, so that the
        middle one waits for half of them."""
        return self.server.api_step + self.server.api_token * (len(delivered) + 1) / 2

    @property
    def speculates(self) -> bool:
        return self.engine.scheduler.proposer is not None

    def die(self) -> list[Job]:
        """The jobs that are lost, in the order in which they came, and with them what the turn in progress brings."""
        jobs = sorted(self._jobs.values(), key=lambda job: job.query.number)
        delivered = self.executor.delivered if self.in_turn else {}
        for job in jobs:
            job.num_delivered = job.seq.num_output_tokens - len(delivered.get(job.seq.key, ([], None))[0])
        self.num_ongoing = self.prompt_backlog = 0
        return jobs


@lru_cache(maxsize=100_000)
def params_for(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0, output_kind=RequestOutputKind.FINAL_ONLY)
