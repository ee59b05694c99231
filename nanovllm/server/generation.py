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
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.errors import ApiError, answering, error_body, refusing
from nanovllm.server.metrics import Figures, RequestObserver
from nanovllm.server.protocol import GenerationRequest, Json, Reply, Usage
from nanovllm.stream import Stream

T = TypeVar("T")


class Generation:
    """The prompts of one request while they are worked on."""

    def __init__(
        self,
        body: GenerationRequest,
        queued: Sequence[tuple[list[int], Stream]],
        reply: Reply,
        figures: Figures,
        tells_cached_tokens: bool,
    ) -> None:
        """`queued`: the token ids of each prompt, and the stream of its output."""
        self.body, self.reply = body, reply
        self.prompts = [token_ids for token_ids, _ in queued]
        self.streams = [stream for _, stream in queued]
        self.usage = Usage(sum(map(len, self.prompts)), tells_cached_tokens)
        self.observers = [RequestObserver(figures) for _ in queued]

    async def whole(self) -> Json:
        """The answer in one piece."""
        choices = []
        for prompt, stream in enumerate(self.streams):
            async for output in stream:  # FINAL_ONLY: there is one
                choices += self._choices(prompt, output, streamed=False)
        return self.reply.envelope(choices, False) | {"usage": self.usage.json()} | self._prompt_ids()

    async def chunks(self) -> AsyncIterator[Json]:
        """The answer as the chunks of a stream, each with the choices that went on."""
        options, begun = self.body.stream_options, False

        def chunk(choices: list[Json]) -> Json:
            nonlocal begun
            more = {} if begun else self._prompt_ids()
            begun = True
            if options.continuous_usage_stats:
                more |= {"usage": self.usage.json()}
            elif options.include_usage:
                more |= {"usage": None}
            return self.reply.envelope(choices, True) | more

        total = len(self.streams) * self.body.n
        openings = [opening for i in range(total) if (opening := self.reply.opening(i)) is not None]
        if openings:
            yield chunk(openings)
        async for prompt, output in merged(self.streams):
            for choice in self._choices(prompt, output, streamed=True):
                yield chunk([choice])
        if options.include_usage:
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
            ids = self.body.return_token_ids and choice.token_ids
            if not streamed or choice.text or choice.logprobs or choice.finished() or ids:
                said = self.reply.choice(prompt * self.body.n + choice.index, choice, streamed)
                choices.append(said | self._token_ids(prompt, choice) if self.body.return_token_ids else said)
        return choices

    def _token_ids(self, prompt: int, choice: CompletionOutput) -> Json:
        ids: Json = {"token_ids": choice.token_ids}
        return ids | {"prompt_token_ids": self.prompts[prompt]} if self.reply.prompts_in_choices else ids

    def _prompt_ids(self) -> Json:
        """In a chat, of which there is one prompt."""
        wanted = self.body.return_token_ids and not self.reply.prompts_in_choices
        return {"prompt_token_ids": self.prompts[0]} if wanted else {}

    async def close(self) -> None:
        """Abort what is not finished."""
        for stream, observer in zip(self.streams, self.observers, strict=True):
            await stream.aclose()
            observer.close()


class EventStream(StreamingResponse):
    """Server-sent events. Whatever ends it, a client that leaves above all, ends its generation at once."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        super().__init__(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        try:
            with answering():
                async for chunk in self.generation.chunks():
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


def add_all(
    llm: AsyncLLM, prompts: Sequence[list[int]], params: SamplingParams, salt: str | None, priority: int, field: str
) -> list[tuple[list[int], Stream]]:
    """Queue every prompt, given by its token ids, or none of them. Raises ApiError, which names the `field` that the
    prompts come from."""
    with refusing(field):
        checked = [llm.check({"prompt_token_ids": prompt, "cache_salt": salt}, params) for prompt in prompts]
    with answering():
        streams = llm.submit(checked, priority=priority)
    return [(request.prompt_token_ids, stream) for request, stream in zip(checked, streams, strict=True)]


async def respond(generation: Generation, request: Request) -> Response:
    if generation.body.stream:
        return EventStream(generation)
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
