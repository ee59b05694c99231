"""The engine as an API process sees it: requests go out as messages, and the tokens that come back become text.

Everything but tokenizing runs in the event loop of the process. The event loop watches the file descriptor of the
socket with the engine's messages. The process tells the engine what it has read only after its readers have had their
turn. So a process that is behind with its clients gets fewer and larger deltas.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from operator import index
from pathlib import Path
from typing import Any

import zmq

from nanovllm.admission import Checked, NeverFits, QueueFull
from nanovllm.config import EngineConfig
from nanovllm.engine.plan import TokenLogprobs
from nanovllm.engine.request import check_request
from nanovllm.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.server import messages
from nanovllm.server.messages import Abort, Add, Counted, End, EngineInfo, Finished, Hello, Scrape, Stop, Taken, Update
from nanovllm.server.wires import Wires
from nanovllm.stream import EngineDead, OutputStream, RequestAborted
from nanovllm.text.bad_words import with_spellings
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.grammars import TokenGrammars
from nanovllm.text.prompts import encode_prompt
from nanovllm.text.token_texts import TokenTexts
from nanovllm.text.tokenizer import Tokenizer

REFUSALS = {kind.__name__: kind for kind in (QueueFull, NeverFits, TypeError, ValueError, RuntimeError)}


class RemoteChoice:
    """One choice of a request, with the part that its reader has not read yet."""

    def __init__(self, index: int, params: SamplingParams, detokenizer: Detokenizer) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.has_news = False
        self._params = params
        self.detokenizer = detokenizer
        self._stop_reason: int | str | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob: float | None = None if params.logprobs is None else 0.0

    def take(self, token_ids: list[int], found: list[TokenLogprobs] | None, end: End | None) -> bool:
        """Take new tokens, and how they end the choice if they do. Returns whether a stop string ended the choice: the
        engine does not know this yet."""
        detokenizer, stopped = self.detokenizer, False
        self.has_news = True
        # A token that ends the output stays in the ids. It becomes text only if the request asks for that.
        hidden = end is not None and end.finish_reason == "stop" and not self._params.include_stop_str_in_output
        for i, token in enumerate(token_ids[:-1] if hidden else token_ids, start=1):
            if (stop := detokenizer.append(token)) is not None:
                token_ids = token_ids[:i]
                self.finish_reason, self._stop_reason, stopped = "stop", stop, True
                break
        self._token_ids += token_ids
        self.num_tokens += len(token_ids)
        if found is not None and self._logprobs is not None and self._cumulative_logprob is not None:
            for token, entry in zip(token_ids, found, strict=False):
                self._logprobs.append(detokenizer.logprobs(token, entry))
                self._cumulative_logprob += entry[token][0]
        if end is not None and not stopped:
            self.finish_reason, self._stop_reason = end.finish_reason, end.stop_reason
        if self.finish_reason is not None:
            detokenizer.finish()
        return stopped

    def delta(self) -> CompletionOutput:
        """What the reader has not read yet. It counts as read from now on."""
        ids, logprobs = self._token_ids, self._logprobs
        self._token_ids, self.has_news = [], False
        if logprobs is not None:
            self._logprobs = []
        return CompletionOutput(
            self.index,
            self.detokenizer.take(),
            ids,
            self._cumulative_logprob,
            logprobs,
            self.finish_reason,
            self._stop_reason,
        )


@dataclass(eq=False)
class RemoteRequest:
    """A request that is not over, with the part that its reader has not read yet."""

    key: int
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    choices: list[RemoteChoice]
    metrics: RequestMetrics
    accepted: asyncio.Future[None]
    scores: messages.Logprobs | None = None  # of the prompt, until the reader has made `prompt_logprobs` of them
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    waiter: asyncio.Future[None] | None = None  # set while the reader waits for news
    error: Exception | None = None  # what the reader gets after the last news

    def __post_init__(self) -> None:
        self.num_open = len(self.choices)

    @property
    def finished(self) -> bool:
        return not self.num_open

    def with_texts(self, scores: messages.Logprobs) -> list[dict[int, Logprob] | None]:
        """The log-probabilities of the prompt. Any thread may call this: a long prompt takes a while."""
        return [None, *self.choices[0].detokenizer.prompt_logprobs(self.prompt_token_ids, scores.entries())]

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        self.error = error
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # marked as seen, even if nobody waits any more
        self.wake()


class RemoteStream(OutputStream):
    """The stream of an `EngineClient`. With FINAL_ONLY parameters, the only delta is the whole output."""

    def __init__(self, request: RemoteRequest, abort: Callable[[RemoteRequest], None]) -> None:
        super().__init__(str(request.key), partial(abort, request))
        self._request = request
        self._final_only = request.params.output_kind is RequestOutputKind.FINAL_ONLY

    async def accepted(self) -> None:
        await self._request.accepted

    async def __anext__(self) -> RequestOutput:
        request = self._request
        while not self._over:
            finished = request.finished
            if finished or not self._final_only:
                if request.scores is not None:
                    scores, request.scores = request.scores, None
                    work = asyncio.to_thread(request.with_texts, scores)
                    request.prompt_logprobs = await self._unless_cancelled(work)
                    continue
                outputs = [choice.delta() for choice in request.choices if choice.has_news]
                if outputs:
                    self._over = finished
                    prompt = request.prompt, request.prompt_token_ids, request.prompt_logprobs
                    return RequestOutput(self.request_id, *prompt, outputs, finished, request.metrics)
            if request.error is not None:
                self._over = True
                raise request.error
            request.waiter = request.accepted.get_loop().create_future()
            await self._unless_cancelled(request.waiter)
        raise StopAsyncIteration


class Uncounted:
    """An observer that does nothing, since the engine's process counts the request."""

    def saw(self, delta: RequestOutput) -> None: ...
    def close(self, reason: str = "abort") -> None: ...


class EngineClient:
    """Satisfies `interface.Engine` and `interface.Meters`. Made and used in one event loop."""

    def __init__(self, info: EngineInfo, wires: Wires, sender: int) -> None:
        self.tokenizer = Tokenizer(Path(info.path))
        self.config = EngineConfig(**info.config)
        self.sampling_defaults = info.sampling_defaults
        self.vocab_size = info.vocab_size
        self.texts = TokenTexts(self.tokenizer)
        self._sender = sender
        self._eos_token_ids = frozenset(info.eos_token_ids)
        self._grammars = TokenGrammars(self.tokenizer, self.vocab_size, self._eos_token_ids, num_threads=1)
        self._keys = count()
        self._next_key = 0
        self._requests: dict[int, RemoteRequest] = {}  # by key
        self._choices: dict[int, tuple[RemoteRequest, RemoteChoice]] = {}  # by stream
        self._scrapes: dict[int, asyncio.Future[bytes]] = {}
        self._refusal: str | None = None
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox, address = wires.listen(self._context, str(sender))
        self._engine = wires.connect(self._context, info.address)
        self._send(Hello(sender, address))
        self._fd = int(self._inbox.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._read)
        self._loop.call_soon(self._read)  # the descriptor tells of what comes, not of what has come already

    # --- interface.Engine ---

    def check(self, prompt: Mapping[str, Any], params: SamplingParams) -> Checked:
        params = with_spellings(params, self.tokenizer)
        given = encode_prompt(prompt, self.tokenizer)
        token_ids, _ = check_request(given, params, self.vocab_size, self._eos_token_ids, self.config)
        if params.structured_outputs is not None:
            self._grammars.compile(params.structured_outputs)  # only to see whether it can be enforced
        return Checked(token_ids, params, prompt.get("cache_salt"), prompt.get("prompt"))

    def submit(self, requests: Sequence[Checked], *, priority: int = 0) -> list[RemoteStream]:
        self.check_health()
        prompts = []
        for request in requests:
            ids, params = messages.pack("i", request.prompt_token_ids), messages.encode_params(request.params)
            prompts.append(messages.Prompt(self._next_key, ids, params, request.cache_salt))
            self._next_key += request.params.n
        # First of all: the engine begins while what follows its answer is made.
        self._send(Add(self._sender, prompts, index(priority), time.perf_counter()))
        added = [self._register(prompt.key, request) for prompt, request in zip(prompts, requests, strict=True)]
        return [RemoteStream(request, self.abort) for request in added]  # dropped, they abort

    def _register(self, key: int, checked: Checked) -> RemoteRequest:
        ids, params = checked.prompt_token_ids, checked.params
        choices = [RemoteChoice(i, params, Detokenizer(self.texts, ids, params)) for i in range(params.n)]
        whole = checked.prompt, ids, params, choices, RequestMetrics(time.perf_counter())
        request = self._requests[key] = RemoteRequest(key, *whole, self._loop.create_future())
        self._choices |= {request.key + choice.index: (request, choice) for choice in choices}
        return request

    def check_health(self) -> None:
        if self._refusal is not None:
            raise EngineDead(self._refusal)

    async def shutdown(self, drain: bool = True) -> None:
        """Leave the engine, which goes on for others. The server calls this when all answers are complete."""
        self.give_up("the server was shut down")
        self._loop.remove_reader(self._fd)
        self._context.destroy()

    # --- interface.Meters ---

    def count(self, name: str, *labels: str) -> None:
        if not self._context.closed:
            self._send(Counted(self._sender, name, list(labels)))

    def observe(self) -> Uncounted:
        return Uncounted()

    async def scrape(self) -> bytes:
        self.check_health()
        number, answer = next(self._keys), self._loop.create_future()
        self._scrapes[number] = answer
        self._send(Scrape(self._sender, number))
        try:
            return await answer
        finally:
            del self._scrapes[number]

    # --- to and from the engine ---

    def abort(self, request: RemoteRequest) -> None:
        """End a request that is not over."""
        if self._forget(request) and self._refusal is None:
            self._send(Abort(self._sender, request.key))

    def give_up(self, reason: str) -> None:
        """Abort all requests that are not over, and tell their readers."""
        for request in list(self._requests.values()):
            self.abort(request)
            request.fail(RequestAborted(f"request {request.key} was aborted: {reason}"))
        self._refusal = self._refusal or reason

    def fail(self, reason: str) -> None:
        """There is no engine any more: tell everybody who waits."""
        self._refusal = self._refusal or reason
        for request in list(self._requests.values()):
            self._forget(request)
            request.fail(EngineDead(self._refusal))
        for answer in self._scrapes.values():
            if not answer.done():
                answer.set_exception(EngineDead(self._refusal))

    def _forget(self, request: RemoteRequest) -> bool:
        """Drop a request. Returns False if that was done before."""
        if self._requests.pop(request.key, None) is None:
            return False
        for choice in request.choices:
            self._choices.pop(request.key + choice.index, None)
        return True

    def _send(self, message: messages.ToEngine) -> None:
        self._engine.send(messages.encode(message), zmq.NOBLOCK)

    def _read(self) -> None:
        num_read = 0
        while True:
            try:
                raw = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._take(messages.decode_update(raw))
            num_read += 1
        if num_read:
            self._loop.call_soon(self._say_taken, num_read)  # behind the readers that were woken

    def _say_taken(self, num_read: int) -> None:
        for _ in range(num_read):
            if not self._context.closed:
                self._send(Taken(self._sender))

    def _take(self, update: Update) -> None:
        for key in update.accepted:
            if (request := self._requests.get(key)) and not request.accepted.done():
                request.accepted.set_result(None)
        for refused in update.refused:
            if request := self._requests.get(refused.key):
                self._forget(request)
                request.fail(REFUSALS[refused.kind](refused.message))
        for key, metrics in update.metrics:
            if request := self._requests.get(key):
                request.metrics = metrics
        for scores in update.prompt_logprobs:
            if request := self._requests.get(scores.stream):
                request.scores = scores
        ends = {end.stream: end for end in update.ends}
        logprobs = {found.stream: found.entries() for found in update.logprobs}
        for number, token_ids in update.deltas():
            if (found := self._choices.get(number)) is None:
                continue  # the choice is over here, and its tokens were on their way
            request, choice = found
            stopped = choice.take(token_ids, logprobs.get(number), ends.get(number))
            if stopped:
                self._send(Stop(self._sender, request.key, choice.index, choice.num_tokens))
            if choice.finish_reason is not None:
                self._choice_is_over(request, choice)
            request.wake()
        for number, text in update.scrapes:
            if (answer := self._scrapes.get(number)) and not answer.done():
                answer.set_result(text)
        if update.failure is not None:
            self.fail(update.failure)

    def _choice_is_over(self, request: RemoteRequest, choice: RemoteChoice) -> None:
        del self._choices[request.key + choice.index]
        request.num_open -= 1
        if request.finished:
            self._forget(request)
            if request.params.stop:
                self._send(Finished(self._sender, request.key))
