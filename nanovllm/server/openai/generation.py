"""From a request to its answer: add the request to the engine, wait or stream, and abort it if the client leaves."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from nanovllm.admission import Checked
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.errors import ApiError, answering, error_body, refusing
from nanovllm.server.interface import Engine, Meters, OutputStream
from nanovllm.server.openai.protocol import GenerationRequest, Json
from nanovllm.server.openai.replies import Reply, Usage
from nanovllm.server.openai.scoring import Echo, PromptLogprobs, prompt_logprobs
from nanovllm.text.parts import Part

T = TypeVar("T")
LIVE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies pass each piece on at once
SHORT = 2048  # token ids: checking so few takes about 0.1 ms


class Generation:
    """The prompts of one request while the engine works on them."""

    ending = b"data: [DONE]\n\n"  # of a stream

    def __init__(
        self,
        body: GenerationRequest,
        queued: Sequence[tuple[list[int], OutputStream]],
        reply: Reply,
        meters: Meters,
        tells_cached_tokens: bool,
        echoes: Sequence[Echo] = (),
    ) -> None:
        """`queued`: the token ids of each prompt, and the stream of its output. `echoes`: each prompt as it stands
        before its outputs; empty if the request does not ask for `echo`."""
        self.body, self.reply = body, reply
        self.prompts = [token_ids for token_ids, _ in queued]
        self.streams = [stream for _, stream in queued]
        self.usage = Usage(sum(map(len, self.prompts)), tells_cached_tokens)
        self.observers = [meters.observe() for _ in queued]
        self.echoes = echoes
        self.echoed: set[int] = set()  # choices whose prompt has been sent
        self.scores: dict[int, PromptLogprobs] = {}  # by prompt

    async def whole(self) -> Json:
        """The whole answer, in one piece."""
        choices = []
        for prompt, stream in enumerate(self.streams):
            async for output in stream:  # FINAL_ONLY: there is one
                output = self._seen(prompt, output)
                for choice in output.outputs:
                    parts = self.reply.parts(prompt * self.body.n + choice.index, choice)
                    choices.append(self._said(prompt, choice, parts, streamed=False))
                    await asyncio.sleep(0)  # a choice with many log-probabilities takes a quarter of a second
        more = self._prompt_ids() | ({} if self.reply.prompts_in_choices else self._prompt_logprobs(0))
        return self.reply.envelope(choices, False) | {"usage": self.usage.json()} | more

    async def stream_to(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Hand the answer to `send` as server-sent events, as the outputs come.

        Nearly every chunk brings nothing but a text. So everything around the text is written only once per choice.
        """
        options, begun = self.body.stream_options, False

        def chunk(choices: list[Json]) -> bytes:
            nonlocal begun
            more = {} if begun else self._prompt_ids()
            begun = True
            if options.continuous_usage_stats:
                more |= {"usage": self.usage.json()}
            elif options.include_usage:
                more |= {"usage": None}
            return event(self.reply.envelope(choices, True) | more)

        total = len(self.streams) * self.body.n
        if openings := [opening for i in range(total) if (opening := self.reply.opening(i)) is not None]:
            await send(chunk(openings))
        frames: dict[Hashable, list[str]] = {}  # by choice, and by kind where an answer has parts of several kinds
        always_more = self.body.return_token_ids or options.continuous_usage_stats
        async for prompt, output in merged(self.streams):
            output = self._seen(prompt, output)
            pieces, to_frame = [], []
            for choice in output.outputs:
                i = prompt * self.body.n + choice.index
                parts: list[Part] | None = None
                key: Hashable = i
                text = choice.text
                if self.reply.splits:
                    parts = self.reply.parts(i, choice)
                    alone = len(parts) == 1 and parts[0].call is None
                    key, text = ((i, parts[0].kind), parts[0].text) if alone else (None, "")
                if key in frames and choice.finish_reason is None:
                    # No text: a stop string or an unfinished character holds it back. Then nothing is sent.
                    if text:
                        pieces.append(quoted(text).join(frames[key]).encode())
                    continue
                parts = self.reply.parts(i, choice) if parts is None else parts
                if self._is_news(choice, parts):
                    pieces.append(chunk([self._said(prompt, choice, parts, streamed=True)]))
                    if text and choice.logprobs is None and not (always_more or choice.finished()):
                        to_frame.append((key, i, choice, [Part(parts[0].kind, "\0")]))
            if pieces:
                await send(b"".join(pieces))
            for key, i, choice, as_nul in to_frame:  # now that the first chunk is on its way
                frames[key] = frame(chunk([self.reply.choice(i, choice, as_nul, True)]))
        if options.include_usage:
            await send(event(self.reply.envelope([], True) | {"usage": self.usage.json()}))

    def failed(self, error: HTTPException) -> bytes:
        """The event of an error in the middle of a stream, when a status can no longer be sent."""
        return event(error_body(error))

    def _seen(self, prompt: int, output: RequestOutput) -> RequestOutput:
        """Count an output, and return what the client is to get of this output. Raises ApiError for a failed choice."""
        self.observers[prompt].saw(output)
        if output.prompt_logprobs is not None:
            self.scores[prompt] = output.prompt_logprobs
        for choice in output.outputs:
            if choice.finish_reason == "error":
                numbers = "the logits of this request are not finite, or rule out every token", "bad_logits"
                grammar = str(choice.stop_reason), "structured_outputs"
                message, code = numbers if choice.stop_reason is None else grammar
                b = self.body
                narrowed = b.allowed_token_ids or b.bad_words or b.logit_bias or b.min_tokens  # by the request itself
                raise ApiError(400 if narrowed and choice.stop_reason is not None else 500, message, code=code)
        if self.body.most_tokens() == 0:
            output = replace(output, outputs=[emptied(choice) for choice in output.outputs])
        self.usage.add(prompt, output)
        return output

    def _is_news(self, choice: CompletionOutput, parts: Sequence[Part]) -> bool:
        ids = self.body.return_token_ids and choice.token_ids
        return bool(any(part.text for part in parts) or choice.logprobs or choice.finished() or ids)

    def _said(self, prompt: int, choice: CompletionOutput, parts: Sequence[Part], streamed: bool) -> Json:
        index = prompt * self.body.n + choice.index
        said = self.reply.choice(index, choice, parts, streamed)
        if self.echoes:
            self.echoes[prompt].shift(said)
            if index not in self.echoed:
                self.echoed.add(index)
                self.echoes[prompt].put_before(said, self.scores.get(prompt))
        if self.body.return_token_ids:
            said |= self._token_ids(prompt, choice)
        return said | self._prompt_logprobs(prompt) if self.reply.prompts_in_choices else said

    def _prompt_logprobs(self, prompt: int) -> Json:
        n, found = self.body.prompt_logprobs, self.scores.get(prompt)
        if n is None or found is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self.prompts[prompt], found, n)}

    def _token_ids(self, prompt: int, choice: CompletionOutput) -> Json:
        ids: Json = {"token_ids": choice.token_ids}
        return ids | {"prompt_token_ids": self.prompts[prompt]} if self.reply.prompts_in_choices else ids

    def _prompt_ids(self) -> Json:
        """The token ids of the prompt, beside the choices; for a chat, which has one prompt."""
        wanted = self.body.return_token_ids and not self.reply.prompts_in_choices
        return {"prompt_token_ids": self.prompts[0]} if wanted else {}

    async def close(self) -> None:
        """Abort what is not finished."""
        for stream, observer in zip(self.streams, self.observers, strict=True):
            await stream.aclose()
            observer.close()


class EventStream(StreamingResponse):
    """Server-sent events. When the response ends, most often because a client leaves, its generation ends at once."""

    def __init__(self, generation: Generation) -> None:
        super().__init__((), headers=LIVE, media_type="text/event-stream")
        self.generation = generation

    async def stream_response(self, send: Send) -> None:
        """Send the whole stream. Starlette's own method would take the pieces from an iterator."""

        async def send_piece(piece: bytes) -> None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            with answering():
                await self.generation.stream_to(send_piece)
        except HTTPException as error:
            await send_piece(self.generation.failed(error))
        await send({"type": "http.response.body", "body": self.generation.ending, "more_body": False})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.generation.close()


def emptied(choice: CompletionOutput) -> CompletionOutput:
    """A choice without the one token that was drawn: the client wants no tokens."""
    logprobs: list[dict[int, Logprob]] | None = None if choice.logprobs is None else []
    return replace(choice, text="", token_ids=[], logprobs=logprobs, finish_reason="length", stop_reason=None)


as_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
quoted = json.encoder.encode_basestring  # what as_json makes of a text


def event(data: Json) -> bytes:
    return f"data: {as_json(data)}\n\n".encode()


def frame(chunk: bytes) -> list[str]:
    """The pieces around the text in a chunk whose text is a NUL and that brings nothing but this text."""
    return chunk.decode().split(quoted("\0"))


async def merged(streams: Sequence[OutputStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
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


async def add_all(
    llm: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    salt: str | None,
    priority: int,
    field: str,
    structure: str,
) -> list[tuple[list[int], OutputStream]]:
    """Queue every prompt, given by its token ids, or none of the prompts.

    Raises ApiError, which names the `field` that the prompts come from, or the field of the `structure`.
    """
    given = [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in prompts]

    def check() -> list[Checked]:
        return [llm.check(prompt, params) for prompt in given]

    with refusing(field, structure):
        checked = check() if is_short(prompts, params) else await asyncio.to_thread(check)
    with answering():
        streams = llm.submit(checked, priority=priority)  # dropped, they abort
        for stream in streams:
            await stream.accepted()
    return [(request.prompt_token_ids, stream) for request, stream in zip(checked, streams, strict=True)]


def is_short(prompts: Sequence[list[int]], params: SamplingParams) -> bool:
    """Whether checking a request takes less time than starting a thread."""
    if params.structured_outputs is not None or params.bad_words or params.allowed_token_ids or params.logit_bias:
        return False
    return len(prompts) == 1 and len(prompts[0]) <= SHORT


async def respond(generation: Generation, request: Request) -> Response:
    if generation.body.stream:
        return EventStream(generation)
    try:
        with answering():
            body = await unless_gone(request, generation.whole())
    finally:
        await generation.close()
    return Response(status_code=499) if body is None else Response(await encoded(body), media_type="application/json")


async def encoded(body: Json) -> bytes:
    """An answer as JSON. Each choice is encoded by itself, so that other requests have their turns in between."""
    before, found, after = as_json(body | {"choices": []} if "choices" in body else body).partition('"choices":[')
    pieces = []
    for choice in body.get("choices", ()):
        pieces.append(as_json(choice))
        await asyncio.sleep(0)
    return f"{before}{found}{','.join(pieces)}{after}".encode()


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None if the client leaves, since nobody will read an answer. `work` is then cancelled."""

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
