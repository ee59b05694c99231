"""The engine takes requests, runs steps and returns outputs.

The scheduler decides what a step computes, and an executor computes it.
"""

import random
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from functools import partial
from itertools import count

from nanovllm.config import EngineConfig
from nanovllm.engine.grammars import Grammars, Matcher
from nanovllm.engine.one_at_a_time import Calls, one_at_a_time
from nanovllm.engine.plan import Executor, StepHandle, StepMasks, StepPlan
from nanovllm.engine.request import Choice, MakeDetokenizer, Request, check_request
from nanovllm.engine.scheduler import Committed, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.trace import Clock, OnEvent, Trace
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import RequestOutputKind, SamplingParams, derive_seed

NO_IDS: frozenset[int] = frozenset()


class LLMEngine:
    """Takes requests, runs steps, returns outputs. After an exception in any method, `abort_all` or `close` frees all.

    Not for several threads: a call during another one, from another thread or from `on_event`, raises RuntimeError at
    once and changes nothing. Any thread may use `check_request` and the three properties `num_...` at any time.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        make_detokenizer: MakeDetokenizer | None = None,
        grammars: Grammars | None = None,
        on_event: OnEvent | None = None,
        clock: Clock = time.perf_counter,
        window: int = 0,
    ) -> None:
        """`config` is resolved, `num_kv_blocks` included. Without `make_detokenizer` outputs have ids but no text, and
        without `grammars` they cannot be structured. `clock` is for events and metrics, and decides nothing. `window`
        is that of `BlockManager`."""
        self.executor = executor
        self.config = config
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.make_detokenizer = make_detokenizer
        self.grammars = grammars
        self.trace = Trace(on_event, clock)
        self.scheduler = Scheduler(config, self.trace, window)
        self.closed = False
        self.calls = Calls()
        self._requests: dict[str, Request] = {}
        self._num_held = 0  # sequences that wait for the first choice of their request to compute the prompt
        self._someone_waits = False  # the last plan had no room for a sequence
        self._in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self._keys = count()
        self._seeds = random.Random(config.seed)

    def check_request(self, prompt_token_ids: SequenceOf[int], params: SamplingParams) -> tuple[list[int], int]:
        """The prompt as a list of plain integers, and the number of tokens at which the request ends with "length".

        Raises ValueError for a request that could never run, and TypeError for ids that are not integers. Any thread
        may call this.
        """
        if params.stop and self.make_detokenizer is None:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer, and there is none; use stop_token_ids")
        return check_request(prompt_token_ids, params, self.vocab_size, self.eos_token_ids, self.config)

    def compile(self, params: SamplingParams) -> Matcher | None:
        """What follows the structured outputs of a request, for `add_request`; None if there are none.

        Any thread may call this, and had better not be the one that steps: it may take a second. Raises ValueError for
        what cannot be enforced.
        """
        if params.structured_outputs is None:
            return None
        if self.grammars is None:
            raise ValueError("structured_outputs needs a tokenizer, and there is none; leave skip_tokenizer_init out")
        return self.grammars.compile(params.structured_outputs)

    @one_at_a_time(wait=False)
    def add_request(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
        prompt: str | None = None,
        arrival_time: float | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        """Queue a request. Smaller `priority` goes first; among equal priorities, the request that was added first.

        Requests share cached prefixes only under the same `cache_salt`. `prompt` is the prompt's text, for the outputs
        only. `arrival_time` is in seconds of the engine's `clock`, for the metrics only. `matcher` is what `compile`
        returned, if the caller has called it. Raises what `check_request` and `compile` do, ValueError for an id in
        use, and RuntimeError once the engine is closed. An error changes nothing.
        """
        if self.closed:
            raise RuntimeError("this engine is closed, and its memory given back: make another")
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is in use by a request that is not finished; choose another")
        token_ids, limit = self.check_request(prompt_token_ids, params)
        matcher = matcher or self.compile(params)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        arrived = self.trace.clock() if arrival_time is None else arrival_time
        request = Request(request_id, prompt, token_ids, params, arrived)
        for choice in range(params.n):
            key = next(self._keys)
            own = params.changed(seed=derive_seed(seed, choice))
            if choice:  # the choices have one prompt, and the first scores it
                own = own.changed(prompt_logprobs=None)
            detokenizer = None if self.make_detokenizer is None else self.make_detokenizer(token_ids, params)
            seq = Sequence(
                key=key,
                request_id=request_id,
                choice=choice,
                token_ids=list(token_ids),
                num_prompt_tokens=len(token_ids),
                params=own,
                limit=limit,
                eos_ids=NO_IDS if params.ignore_eos else self.eos_token_ids,
                priority=priority,
                arrival=key,
                cache_salt=cache_salt,
                read_token=None if detokenizer is None else detokenizer.append,
                matcher=matcher and matcher.copy(),
            )
            request.choices.append(Choice(seq, detokenizer))
        self._requests[request_id] = request
        seqs = [choice.seq for choice in request.choices]
        # The other choices wait for the first, if they can find its prompt in the prefix cache then.
        shareable = self.config.enable_prefix_caching and len(token_ids) > self.scheduler.block_size
        request.held = seqs[1:] if shareable else []
        self._num_held += len(request.held)
        for seq in seqs[: len(seqs) - len(request.held)]:
            self._start(seq)

    def _start(self, seq: Sequence) -> None:
        self.executor.add(seq.key, seq.token_ids, seq.params)
        self.scheduler.add(seq)
        self.trace.emit("added", seq, prompt_tokens=seq.num_prompt_tokens, priority=seq.priority)

    @one_at_a_time(wait=False)
    def abort_request(self, request_id: str) -> None:
        """End a request at once, in whatever state it is, without further output. An unknown id is no error."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._num_held -= len(request.held)
        for choice in request.choices:
            if choice.seq.key in self.scheduler.sequences:
                self.scheduler.finish(choice.seq, "abort")
                self.executor.remove(choice.seq.key)

    @one_at_a_time(wait=False)
    def stop_choice(self, request_id: str, choice: int) -> None:
        """End one choice of a request whose reader has met a stop string in it; the other choices go on. A request that
        is over is no error."""
        request = self._requests.get(request_id)
        seq = None if request is None else request.choices[choice].seq
        if request is not None and seq is not None and seq.key in self.scheduler.sequences:
            self.scheduler.finish(seq, "stop")
            self._choice_is_over(request, seq, self.trace.clock())

    def has_unfinished(self) -> bool:
        """Whether `step` has something left to do: a request, or a step in flight whose requests have all ended."""
        return bool(self._requests or self._in_flight)

    @property
    def num_running(self) -> int:
        """Sequences that have a seat in the batch. Any thread may read this and the next two."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that have no seat."""
        return len(self.scheduler.waiting) + self._num_held

    @property
    def num_free_seats(self) -> int:
        """Seats for new sequences. There are none while a sequence waits, since no other may overtake it."""
        return 0 if self._someone_waits else self.config.max_num_seqs - self.num_running

    @one_at_a_time(wait=False)
    def step(self) -> list[RequestOutput]:
        """Submit the next step, and take in the oldest step that should be finished: the same one, or with asynchronous
        scheduling the step before. Returns an output for every request that got something new."""
        return self._report(*self._advance())

    @one_at_a_time(wait=False)
    def advance(self) -> tuple[list[Committed], dict[str, Request]]:
        """As `step`, but returns what the step brought, and not outputs made of all that there is so far: for each
        sequence its new tokens, and by id the requests of those sequences that got their first token or have ended.
        Nobody is shown text or log-probabilities here."""
        return self._advance()

    def _advance(self) -> tuple[list[Committed], dict[str, Request]]:
        plan = self.scheduler.schedule()
        self._someone_waits = len(self.scheduler.waiting) > 0
        handle = self.executor.submit(plan) if plan.scheduled else None
        committed = self._commit_oldest() if self._in_flight else []
        if handle is not None:
            if plan.masked:  # now all tokens before this step's are known, and the device is busy with the model
                handle.draw(self._masks(plan, handle))
            self._in_flight.append((plan, handle))
            if not self.config.async_scheduling:
                committed = self._commit_oldest()
        now = self.trace.clock()
        changed: dict[str, Request] = {}
        for seq, token_ids, _ in committed:
            if seq.finish_reason is None and seq.first_token_time is not None:
                continue  # neither the first token nor the last: nothing changes for the request
            # Two choices may end in one step: after the first of them, the request is not in `_requests` any more.
            request = changed[seq.request_id] = changed.get(seq.request_id) or self._requests[seq.request_id]
            if seq.first_token_time is None and token_ids:
                seq.first_token_time = now
            if request.held:  # the first choice has computed the prompt, or failed
                for other in request.held:
                    self._start(other)
                self._num_held -= len(request.held)
                request.held = []
            if seq.finish_reason is not None:
                self._choice_is_over(request, seq, now)
        return committed, changed

    def _commit_oldest(self) -> list[Committed]:
        plan, handle = self._in_flight.popleft()
        return self.scheduler.commit(plan, handle.result())

    def _masks(self, plan: StepPlan, handle: StepHandle) -> StepMasks:
        """The masks of a step's sequences, for those that are not over by now."""
        assert self.grammars is not None
        guesses = {} if self.scheduler.proposer is None else handle.guesses()
        keys, wanted = [], []
        for key in plan.masked:
            seq = self.scheduler.sequences.get(key)
            if seq is not None and seq.matcher is not None:
                keys.append(key)
                wanted.append((seq.matcher, guesses.get(key, ())))
        number = sum(len(given) + 1 for _, given in wanted)
        return StepMasks(keys, number, partial(self.grammars.fill, wanted))

    def _choice_is_over(self, request: Request, seq: Sequence, now: float) -> None:
        self.executor.remove(seq.key)
        if request.finished:
            request.finished_time = now
            self._requests.pop(request.request_id, None)  # two choices may end in one step

    def _report(self, committed: list[Committed], changed: dict[str, Request]) -> list[RequestOutput]:
        cumulative = RequestOutputKind.CUMULATIVE
        shown: dict[str, Request] = {}
        for seq, token_ids, logprobs in committed:
            request = changed.get(seq.request_id) or self._requests[seq.request_id]
            choice = request.choices[seq.choice]
            if choice.logprobs is not None and logprobs is not None:
                choice.logprobs.add(token_ids, logprobs)
            if seq.finish_reason is not None and choice.detokenizer is not None:
                choice.detokenizer.finish()
            if seq.finish_reason is not None or request.params.output_kind is cumulative:
                shown[request.request_id] = request
        return [r.output() for r in shown.values() if r.finished or r.params.output_kind is cumulative]

    @one_at_a_time(wait=False)
    def abort_all(self) -> None:
        """End every request without output and forget every cached block, even if an exception cut a step short."""
        self._abort_all()

    def _abort_all(self) -> None:
        seqs = [choice.seq for request in self._requests.values() for choice in request.choices]
        self._requests.clear()
        self._in_flight.clear()
        self._num_held, self._someone_waits = 0, False
        self.scheduler.reset()
        for seq in seqs:
            self.executor.remove(seq.key)
        for seq in seqs:
            if seq.finish_reason is None:
                seq.finish_reason = "abort"
                self.trace.emit("finished", seq, reason="abort")

    @one_at_a_time(wait=False)
    def close(self) -> None:
        """Abort everything and release the executor. Nothing can be added afterwards. May be called twice."""
        self.closed = True
        try:
            self._abort_all()
        finally:  # `on_event` may raise
            self.executor.close()
