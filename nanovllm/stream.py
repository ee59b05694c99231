"""The output of one request as an asynchronous stream of deltas, fed by the thread of the step loop.

The step loop puts the newest state of the output into `Pending` and wakes the reader's event loop. The reader iterates
over `Stream`. Only the reader holds the stream: when it is dropped, its request is aborted.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Self, TypeVar

from nanovllm.outputs import CompletionOutput, RequestOutput, logprobs_from

T = TypeVar("T")


class EngineDead(RuntimeError):
    """No step loop serves requests any more: it was shut down, or an exception ended it, which is the `__cause__`."""


class RequestAborted(RuntimeError):
    """The request was ended before it was finished, by `abort` or by a shutdown."""


@dataclass(eq=False)
class Pending:
    """A request that is not over, and what its reader has not read of it."""

    request_id: str  # the caller's
    key: str  # the engine's; never used twice, so that what comes late meets nobody else
    # The newest state of the output is all that is kept: a slow reader costs no memory, it just gets larger deltas.
    newest: deque[RequestOutput] = field(default_factory=lambda: deque(maxlen=1))
    error: Exception | None = None  # what the reader gets after that
    reader: asyncio.AbstractEventLoop | None = None  # set by the reader, before it first looks for something to read
    news: asyncio.Event = field(default_factory=asyncio.Event)  # used in the reader's event loop only
    # What was read of each choice: numbers of token ids and characters, and whether that was the end.
    read: dict[int, tuple[int, int, bool]] = field(default_factory=dict)

    def delta(self, output: RequestOutput) -> RequestOutput:
        """What `output` has of each choice that was not read before. It counts as read then."""
        choices: list[CompletionOutput] = []
        for choice in output.outputs:
            before = self.read.get(choice.index, (0, 0, False))
            self.read[choice.index] = now = len(choice.token_ids), len(choice.text), choice.finished()
            if now != before:
                tokens, characters, _ = before
                new = choice.text[characters:], choice.token_ids[tokens:], choice.cumulative_logprob
                ended = choice.finish_reason, choice.stop_reason
                choices.append(CompletionOutput(choice.index, *new, logprobs_from(choice, tokens), *ended))
        prompt = output.prompt, output.prompt_token_ids, output.prompt_logprobs
        return RequestOutput(self.request_id, *prompt, choices, output.finished, output.metrics)


class OutputStream(ABC):
    """The outputs of one request as an asynchronous iterator of deltas: each has, for every choice that went on, the
    text, token ids and log-probabilities since the one before. Joined they are the whole output.

    Cancelling the task that waits here, `aclose`, and dropping the stream all abort the request. Iterating raises
    EngineDead or RequestAborted where the output will not be finished.
    """

    def __init__(self, request_id: str, abort: Callable[[], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._over = False

    @abstractmethod
    async def accepted(self) -> None:
        """Wait until the engine has accepted the request. Raises QueueFull, or any other reason for a refusal."""

    @abstractmethod
    async def __anext__(self) -> RequestOutput: ...

    def __aiter__(self) -> Self:
        return self

    async def _unless_cancelled(self, awaited: Awaitable[T]) -> T:
        """The result of `awaited`. A reader that is cancelled meanwhile aborts its request."""
        try:
            return await awaited
        except asyncio.CancelledError:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Abort the request, if it is not over. Nothing can be read afterwards."""
        self._over = True
        self._abort()

    def __del__(self) -> None:
        self._abort()


class Stream(OutputStream):
    """The stream of an `AsyncLLM`."""

    def __init__(self, request: Pending, abort: Callable[[Pending], None]) -> None:
        super().__init__(request.request_id, partial(abort, request))
        self._request = request

    async def accepted(self) -> None:
        """Returns at once: `submit` has accepted the request already."""

    async def __anext__(self) -> RequestOutput:
        request = self._request
        request.reader = asyncio.get_running_loop()
        while not self._over:
            request.news.clear()
            if request.newest:
                delta = request.delta(request.newest.pop())
                self._over = delta.finished
                if delta.outputs:
                    return delta
            elif request.error is not None:
                self._over = True
                raise request.error
            else:
                await self._unless_cancelled(request.news.wait())
        raise StopAsyncIteration
