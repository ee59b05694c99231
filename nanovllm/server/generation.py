"""From a request to its answer: add it to the engine, wait or stream, and give it up when the client is gone."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from nanovllm.async_llm import AsyncLLM
from nanovllm.llm import Prompt
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.errors import ApiError, answering, error_body
from nanovllm.server.metrics import Metrics, RequestObserver
from nanovllm.server.protocol import Json, Reply, Usage
from nanovllm.stream import Stream

T = TypeVar("T")


class Generation:
    """The prompts of one request while they are worked on."""

    def __init__(self, streams: Sequence[Stream], num_choices: int, reply: Reply, metrics: Metrics) -> None:
        self.streams = streams
        self.num_choices = num_choices  # of each prompt
        self.reply = reply
        self.usage = Usage()
        self.observers = [RequestObserver(metrics) for _ in streams]

    async def whole(self) -> Json:
        """The answer in one piece."""
        choices = []
        for prompt, stream in enumerate(self.streams):
            async for output in stream:  # FINAL_ONLY: there is one
                choices += self._choices(prompt, output, streamed=False)
        return self.reply.envelope(choices, False) | {"usage": self.usage.json()}

    async def chunks(self, include_usage: bool) -> AsyncIterator[Json]:
        """The answer as the chunks of a stream, each with the choices that went on."""
        more: Json = {"usage": None} if include_usage else {}
        total = len(self.streams) * self.num_choices
        openings = [opening for i in range(total) if (opening := self.reply.opening(i)) is not None]
        if openings:
            yield self.reply.envelope(openings, True) | more
        async for prompt, output in merged(self.streams):
            for choice in self._choices(prompt, output, streamed=True):
                yield self.reply.envelope([choice], True) | more
        if include_usage:
            yield self.reply.envelope([], True) | {"usage": self.usage.json()}

    def _choices(self, prompt: int, output: RequestOutput, streamed: bool) -> list[Json]:
        self.observers[prompt].saw(output)
        self.usage.add(prompt, output)
        choices = []
        for choice in output.outputs:
            if choice.finish_reason == "error":
                numbers = "the logits of this request are not finite, or rule out every token", "bad_logits"
                grammar = str(choice.stop_reason), "structured_outputs"
                message, code = numbers if choice.stop_reason is None else grammar
                raise ApiError(500, message, code=code)
            # Text that is held back, for a stop string or an unfinished character, is no news to a client.
            if not streamed or choice.text or choice.logprobs or choice.finished():
                choices.append(self.reply.choice(prompt * self.num_choices + choice.index, choice, streamed))
        return choices

    async def close(self) -> None:
        """Abort what is not finished."""
        for stream, observer in zip(self.streams, self.observers, strict=True):
            await stream.aclose()
            observer.close()


class EventStream(StreamingResponse):
    """Server-sent events. Whatever ends it, a client that leaves above all, ends its generation at once."""

    def __init__(self, generation: Generation, include_usage: bool) -> None:
        self.generation = generation
        super().__init__(self._events(include_usage), media_type="text/event-stream")

    async def _events(self, include_usage: bool) -> AsyncIterator[str]:
        try:
            with answering():
                async for chunk in self.generation.chunks(include_usage):
                    yield event(chunk)
        except HTTPException as error:  # too late for a status
            yield event(error_body(error))
        yield "data: [DONE]\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.generation.close()


def event(data: Json) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def merged(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The outputs of all streams as they come, each with the index of its stream."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    reading = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = reading.pop(task)
                try:
                    output = task.result()
                except StopAsyncIteration:
                    continue
                yield i, output
                reading[asyncio.ensure_future(anext(streams[i]))] = i
    finally:
        for task in reading:
            task.cancel()


def add_all(llm: AsyncLLM, prompts: Sequence[Prompt], params: SamplingParams, priority: int) -> list[Stream]:
    """Encode and queue every prompt. Runs in a thread, as tokenizing takes its time; where one prompt is refused, the
    streams of the others are dropped, which aborts them."""
    return [llm.generate(prompt, params, priority=priority) for prompt in prompts]


async def respond(generation: Generation, request: Request, stream: bool, include_usage: bool) -> Response:
    if stream:
        return EventStream(generation, include_usage)
    try:
        with answering():
            body = await unless_gone(request, generation.whole())
    finally:
        await generation.close()
    return Response(status_code=499) if body is None else JSONResponse(body)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, which is cancelled when the client leaves; then None, as nobody will read an answer."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
