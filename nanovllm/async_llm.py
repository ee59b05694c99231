"""The engine for many callers at once: each gets its output while it is made, with `async for`.

Producers, which are any number of tasks and threads, check their requests and put them into the inbox. One consumer
thread owns the engine: it takes in what lies in the inbox, steps, and hands the outputs out. With nothing to do it
sleeps at the inbox. (vLLM's `AsyncLLM` has the same two sides, in two processes.)
"""

import asyncio
import atexit
import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from operator import index
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias
from uuid import uuid4

from nanovllm.admission import Checked, check_queue
from nanovllm.config import EngineConfig
from nanovllm.engine.trace import OnEvent
from nanovllm.llm import LLM, Prompt, as_list
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.stream import EngineDead, Pending, RequestAborted, Stream
from nanovllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Functions that the step loop is to call. None: end the loop, and abort unfinished requests.
Inbox: TypeAlias = "SimpleQueue[Callable[[], None] | None]"


class AsyncLLM:
    """A model that serves many requests at once. Called from any task and any thread.

        async with AsyncLLM("Qwen/Qwen3-0.6B") as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=100)):
                print(output.outputs[0].text, end="")

    max_queue: as many sequences may wait before more are refused with QueueFull; None: any number.
    on_event, config: as for `LLM`. `on_event` is called in the step loop's thread, and all requests wait for it. It may
        call `abort`; `generate`, `add_request` and `shutdown` raise RuntimeError there, for who waits for the step loop
        inside of it waits for ever.

    The engine inside belongs to the step loop: calls of `self.llm.generate` and the like raise RuntimeError. An object
    is also shut down when nobody holds it or one of its streams any more. An `on_event` that holds the object keeps it.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        max_queue: int | None = None,
        on_event: OnEvent | None = None,
        **config: Any,
    ) -> None:
        if not isinstance(max_queue, int | None) or isinstance(max_queue, bool):
            raise TypeError(f"max_queue must be an integer or None; got {max_queue!r}")
        if max_queue is not None and max_queue < 1:
            raise ValueError(f"max_queue must be at least 1, or None for any number; got {max_queue}")
        self.llm = LLM(model, on_event=on_event, **config)
        self.max_queue = max_queue
        self._inbox: Inbox = SimpleQueue()
        self._lock = threading.RLock()  # re-entrant: a garbage collection in here may drop a stream
        self._keys = map(str, count())
        self._requests: dict[str, Pending] = {}  # by the caller's id; guarded by the lock, as the next two
        self._refusal: str | None = None  # why nothing is accepted any more
        self._cause: BaseException | None = None
        self._num_arriving = 0  # sequences whose request lies in the inbox
        # Sequences that wait in the engine, and its free seats: published by the step loop, in one assignment.
        self._load = self.llm.engine.num_waiting, self.llm.engine.num_free_seats
        # The step loop's own.
        self._added: dict[str, Pending] = {}  # by `key`
        self._serving = True
        mine = weakref.ref(self), self._inbox, self.llm
        self._thread = threading.Thread(target=step_loop, args=mine, name="nanovllm-step-loop", daemon=True)
        self._thread.start()
        self._when_dropped = weakref.finalize(self, self._inbox.put, None)
        self._when_dropped.atexit = False
        self._at_exit = partial(end_with_the_process, self._inbox, self._thread)
        atexit.register(self._at_exit)

    # --- the producers ---

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> Stream:
        """Complete one prompt, which is anything that `LLM.generate` takes for one. See `add_request`.

        Without sampling_params the checkpoint's defaults hold.
        """
        prompts = as_list(prompt)
        if len(prompts) != 1:
            raise ValueError(f"generate takes one prompt and got {len(prompts)}; call it for each, they run together")
        params = SamplingParams(**self.llm.sampling_defaults) if sampling_params is None else sampling_params
        [stream] = self.submit([self.check(prompts[0], params)], [request_id], priority=priority)
        return stream

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
        *,
        prompt: str | None = None,
    ) -> Stream:
        """Queue a request, as `LLMEngine.add_request` does. With FINAL_ONLY parameters its only delta is the whole.

        Raises, before anything is queued, ValueError or TypeError for what could never run and for an id that is in
        use, QueueFull, EngineDead, and RuntimeError when called by `on_event`.
        """
        checked = self._checked(prompt_token_ids, params, cache_salt, prompt)
        [stream] = self.submit([checked], [request_id], priority=priority)
        return stream

    def check(self, prompt: Mapping[str, Any], params: SamplingParams) -> Checked:
        """Encode a prompt, and see whether it can run. Any thread may call this, and nothing is queued.

        Raises ValueError or TypeError for what could never run. These are all the mistakes that a caller can make in
        prompt and parameters: an error of `submit` has other reasons.
        """
        return self._checked(self.llm.encode(prompt), params, prompt.get("cache_salt"), prompt.get("prompt"))

    def _checked(self, token_ids: Sequence[int], params: SamplingParams, salt: str | None, text: str | None) -> Checked:
        if not isinstance(salt, str | None) or any("\ud800" <= c <= "\udfff" for c in salt or ""):
            raise ValueError(f"cache_salt must be None or text that can be encoded; got {salt!r}")
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams; got {params!r}")
        params = self.llm.prepare(params)
        ids, _ = self.llm.engine.check_request(token_ids, params)
        return Checked(ids, params, salt, text, self.llm.engine.compile(params))

    def submit(
        self, requests: Sequence[Checked], request_ids: Sequence[str | None] = (), *, priority: int = 0
    ) -> list[Stream]:
        """Queue all of these requests, or none. A request without an id gets one.

        Raises QueueFull, its subclass NeverFits, EngineDead, ValueError for an id that is in use, TypeError for an id
        or a priority of the wrong type, and RuntimeError when called by `on_event`.
        """
        arrived = time.perf_counter()
        self._refuse_on_event()
        if not hasattr(priority, "__index__"):
            raise TypeError(f"priority must be an integer; got {priority!r}")
        priority = index(priority)
        for request_id in request_ids:
            if not isinstance(request_id, str | None):
                raise TypeError(f"request_id must be a string or None; got {request_id!r}")
        ids = [request_id or uuid4().hex for request_id in request_ids or [None] * len(requests)]
        if len(set(ids)) < len(ids):
            raise ValueError(f"request_ids must differ; got {ids!r}")
        pending = [Pending(request_id, next(self._keys)) for request_id in ids]
        num_sequences = sum(request.params.n for request in requests)
        with self._lock:
            self.check_health()
            for request_id in ids:
                if request_id in self._requests:
                    raise ValueError(
                        f"request_id {request_id!r} is in use by a request that is not over; choose another"
                    )
            self._check_queue(num_sequences)
            self._num_arriving += num_sequences
            for request, checked in zip(pending, requests, strict=True):
                self._requests[request.request_id] = request
                self._inbox.put(partial(self._add, request, checked, priority, arrived))
        return [Stream(request, self._abort) for request in pending]

    def abort(self, request_id: str) -> None:
        """End a request; its reader gets RequestAborted. The id is free at once. No such request: nothing happens."""
        with self._lock:
            if request_id in self._requests:
                self._abort(self._requests[request_id])

    def check_health(self) -> None:
        """Raises EngineDead once no request can be served any more, from the exception that was the reason."""
        if self._refusal is not None:
            raise EngineDead(self._refusal) from self._cause
        if not self._thread.is_alive():
            raise EngineDead("this AsyncLLM was made before this process was forked; make one in the process itself")

    async def shutdown(self, drain: bool = True) -> None:
        """Accept nothing more; finish what was accepted, or abort it; give all memory back and end the thread.

        May be called again, say with `drain=False` when the first call takes too long.
        """
        self._refuse_on_event()
        with self._lock:
            self._refusal = self._refusal or "the engine was shut down"
            self._inbox.put(partial(self._stop, drain))
        await asyncio.to_thread(self._thread.join)
        atexit.unregister(self._at_exit)
        self._when_dropped.detach()  # it would hold the inbox, and with it what nobody took out

    def _refuse_on_event(self) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError("on_event runs in the step loop and must not wait for it: do that in another thread")

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.shutdown(drain=exception[0] is None)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.llm.tokenizer

    @property
    def config(self) -> EngineConfig:
        return self.llm.config

    @property
    def vocab_size(self) -> int:
        return self.llm.engine.vocab_size

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        return self.llm.sampling_defaults

    @property
    def num_waiting(self) -> int:
        """Sequences that have no seat in the batch, each choice of a request counted."""
        with self._lock:
            return self._num_arriving + self._load[0]

    def _check_queue(self, num_sequences: int) -> None:
        """Raises QueueFull if more than `max_queue` sequences would wait once the free seats were taken."""
        waiting, free_seats = self._load
        seats = self.llm.config.max_num_seqs
        check_queue(num_sequences, self._num_arriving + waiting, free_seats, seats, self.max_queue)

    def _publish(self) -> None:
        self._load = self.llm.engine.num_waiting, self.llm.engine.num_free_seats

    def _abort(self, request: Pending) -> None:
        if self._forget(request):
            error = RequestAborted(f"request {request.request_id!r} was aborted")
            self._inbox.put(partial(self._end, request, error))

    def _forget(self, request: Pending) -> bool:
        """Free the request's id. Returns False if that was done before."""
        with self._lock:
            if self._requests.get(request.request_id) is not request:
                return False
            del self._requests[request.request_id]
            return True

    # --- the consumer: all that follows runs in its thread ---

    def _work(self) -> bool:
        """Step until nothing is left to do. Returns whether more may be asked."""
        engine = self.llm.engine
        while True:
            for _ in range(self._inbox.qsize()):  # all that has come begins in the same step
                self._do(self._inbox.get())
            self._hand_out(engine.step())
            self._publish()
            if not engine.has_unfinished():
                return self._serving

    def _do(self, call: Callable[[], None] | None) -> None:
        if call is None:
            self._stop(drain=False)
        else:
            call()

    def _end_all(self, error: BaseException | None) -> None:
        """The step loop is over: tell everybody who waits."""
        with self._lock:
            if error is not None:
                self._refusal, self._cause = f"the step loop has ended: {error!r}", error
            left = list(self._requests.values())
            self._requests.clear()
            self._num_arriving = 0
        self._added.clear()
        for request in left:
            request.error = EngineDead(self._refusal)
            request.error.__cause__ = error
        self._wake(left)

    def _add(self, request: Pending, checked: Checked, priority: int, arrived: float) -> None:
        ids, params, salt, text = checked.prompt_token_ids, checked.params, checked.cache_salt, checked.prompt
        with self._lock:  # so that nobody counts it twice, or not at all
            self._num_arriving -= params.n
            try:
                self.llm.engine.add_request(request.key, ids, params, priority, salt, text, arrived, checked.matcher)
            except (ValueError, TypeError) as error:
                self._end(request, error)
                return
            self._publish()
        self._added[request.key] = request

    def _end(self, request: Pending, error: Exception) -> None:
        """End a request in whatever state it is."""
        self.llm.engine.abort_request(request.key)
        self._publish()
        self._added.pop(request.key, None)
        self._forget(request)
        request.error = error
        self._wake([request])

    def _stop(self, drain: bool) -> None:
        self._serving = False
        for request in [] if drain else list(self._added.values()):
            self._end(request, RequestAborted(f"request {request.request_id!r} was aborted by a shutdown"))

    def _hand_out(self, outputs: list[RequestOutput]) -> None:
        requests = []
        for output in reversed(outputs):  # newest first: a first token waits for nobody else
            requests.append(request := self._added[output.request_id])
            request.newest.append(output)
            if output.finished:
                del self._added[output.request_id]
                self._forget(request)
        self._wake(requests)

    def _wake(self, requests: Iterable[Pending]) -> None:
        """Tell the readers, with one call into each event loop."""
        by_reader = defaultdict(list)
        for request in requests:
            if request.reader is not None:
                by_reader[request.reader].append(request)
        for reader, woken in by_reader.items():
            try:
                reader.call_soon_threadsafe(tell, woken)
            except RuntimeError:  # the event loop is closed, so that nobody can read on
                for request in woken:
                    self._abort(request)


def tell(requests: list[Pending]) -> None:
    for request in requests:
        request.news.set()


def step_loop(found: "weakref.ref[AsyncLLM]", inbox: Inbox, llm: LLM) -> None:
    """The thread that takes from the inbox. While idle, it holds no AsyncLLM, which can then be freed."""
    error = None
    llm.engine.calls.owner = threading.get_ident()
    try:
        serving = True
        while serving:
            call = inbox.get()  # an idle engine sleeps here
            if (owner := found()) is not None:
                owner._do(call)
            del call  # it holds a request, and the steps may go on for long
            serving = owner is not None and owner._work()
            del owner
    except BaseException as caught:
        logger.exception("the step loop has ended, and no request can be served any more")
        error = caught
    if (owner := found()) is not None:
        owner._end_all(error)
    try:
        llm.close()
    except Exception:
        logger.exception("an error while the engine was closed")
    finally:
        llm.engine.calls.owner = None


def end_with_the_process(inbox: Inbox, thread: threading.Thread) -> None:
    """For a program that never calls `shutdown`: Python would crash at its end if the thread were in the middle of a
    step. A thread that hangs delays the end of the process by ten seconds at most."""
    inbox.put(None)
    thread.join(timeout=10)
