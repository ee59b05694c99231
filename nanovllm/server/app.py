"""The application: its routes, and who may ask."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

from nanovllm.async_llm import AsyncLLM
from nanovllm.server import errors
from nanovllm.server.errors import ApiError, answering, refusing
from nanovllm.server.generation import Generation, add_all, respond
from nanovllm.server.metrics import Metrics
from nanovllm.server.middleware import Guard, Watch
from nanovllm.server.options import AppOptions
from nanovllm.server.protocol import (
    ChatReply,
    ChatRequest,
    CompletionReply,
    CompletionRequest,
    GenerationRequest,
    Reply,
)
from nanovllm.stream import Stream
from nanovllm.text.chat import num_characters
from nanovllm.text.render import Renderer

COMPLETION_MAX_TOKENS = 16  # OpenAI's default


def build_app(llm: AsyncLLM, *, model_name: str, options: AppOptions = AppOptions()) -> FastAPI:  # noqa: B008 (frozen)
    """The server as an ASGI application. It owns `llm`, and shuts it down when it is shut down itself.

    `app.state.refused(reason)` counts a connection that was closed before it was a request.
    """
    if llm.llm.tokenizer is None:
        raise ValueError("a server needs the tokenizer; leave skip_tokenizer_init out")
    tokenizer, config, defaults = llm.llm.tokenizer, llm.llm.config, llm.llm.sampling_defaults
    assert config.max_model_len
    most_characters = config.max_model_len * max(map(len, tokenizer.fast.get_vocab()))
    metrics = Metrics(llm, model_name)
    tokenizer.renderer = renderer = Renderer()  # whoever made the checkpoint may be no friend
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await llm.shutdown(drain=False)  # the answers that were waited for are complete by now
        renderer.close()

    # No pages with documentation: they load their scripts from elsewhere.
    app = FastAPI(title="nanovllm", docs_url=None, redoc_url=None, lifespan=lifespan)
    errors.install(app)

    def check_model(name: str | None) -> None:
        if name is not None and name != model_name:
            raise ApiError(404, f"there is no model {name[:100]!r} here, only {model_name!r}", code="model_not_found")

    def check_length(num_characters: int, param: str) -> None:
        """Before a text is tokenized, which takes seconds for the largest body."""
        if num_characters > most_characters:
            what = f"{num_characters} characters are more than max_model_len={config.max_model_len} tokens can hold"
            raise ApiError(400, f"{what}; shorten the prompt", param=param, code="context_length_exceeded")

    def check_priority(priority: int) -> None:
        if priority and not options.allow_priority:
            message = "this server lets no client go first; leave priority out, or start it with --allow-priority"
            raise ApiError(400, message, param="priority")

    def salt_of(body: GenerationRequest, request: Request) -> str | None:
        """The client's, within that of its key."""
        key = getattr(request.state, "salt", None)
        return body.cache_salt if key is None else f"{key}/{body.cache_salt or ''}"

    async def answer(body: GenerationRequest, request: Request, streams: list[Stream], reply: Reply) -> Response:
        generation = Generation(streams, body.n, reply, metrics.figures, options.tells_cached_tokens)
        return await respond(generation, request, body.stream, body.stream_options.include_usage)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        check_model(body.model)
        check_priority(body.priority)
        prompts = body.prompts(salt_of(body, request))
        check_length(max(len(prompt.get("prompt", "")) for prompt in prompts), "prompt")
        with refusing("prompt"):
            max_tokens = body.max_tokens or defaults.get("max_tokens", COMPLETION_MAX_TOKENS)
            params = body.sampling_params(max_tokens, body.logprobs, defaults)
        streams = await asyncio.to_thread(add_all, llm, prompts, params, body.priority, "prompt")
        reply = CompletionReply(model_name, body.logprobs, request.state.request_id)
        return await answer(body, request, streams, reply)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        check_model(body.model)
        check_priority(body.priority)
        messages = [message.model_dump() for message in body.messages]
        check_length(sum(map(num_characters, messages)), "messages")
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        try:
            token_ids = await asyncio.to_thread(tokenizer.encode_chat, messages)
        except ValueError as error:  # the template's own reason, above all
            raise ApiError(400, str(error), param="messages") from error
        with refusing("messages"):
            room = room_for(len(token_ids))
            max_tokens = body.max_completion_tokens or body.max_tokens or min(defaults.get("max_tokens", room), room)
            params = body.sampling_params(max_tokens, num_logprobs, defaults)
        prompt = {"prompt_token_ids": token_ids, "cache_salt": salt_of(body, request)}
        streams = await asyncio.to_thread(add_all, llm, [prompt], params, body.priority, "messages")
        return await answer(body, request, streams, ChatReply(model_name, num_logprobs, request.state.request_id))

    def room_for(num_prompt_tokens: int) -> int:
        """As many tokens as the model's context and the KV pool allow one sequence."""
        assert config.max_model_len and config.num_kv_blocks and config.kvcache_block_size
        longest = min(config.max_model_len, config.num_kv_blocks * config.kvcache_block_size + 1)
        return max(longest - num_prompt_tokens, 1)

    def model_card() -> dict[str, Any]:
        kind = {"id": model_name, "object": "model", "created": started, "owned_by": "nanovllm"}
        return kind | {"max_model_len": config.max_model_len}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name)
        return model_card()

    @app.get("/health")
    async def health() -> dict[str, str]:
        with answering():
            llm.check_health()
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics_text() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    # The last one is the outermost. Answers to pages of other origins, which may hold no key, need no key.
    app.add_middleware(Guard, options=options)
    if options.allowed_origins:
        more: Any = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["X-Request-Id"]}
        app.add_middleware(CORSMiddleware, allow_origins=options.allowed_origins, **more)
    paths = {path for route in app.routes if "{" not in (path := getattr(route, "path", "{"))}
    app.add_middleware(Watch, figures=metrics.figures, paths=paths, access_log=options.access_log)
    app.state.refused = partial(metrics.figures.count, "http_connections_refused")
    return app
