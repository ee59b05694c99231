"""The application: its routes, and who may ask."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from secrets import compare_digest
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.async_llm import AsyncLLM
from nanovllm.server import errors
from nanovllm.server.errors import ApiError, answering, error_response, refusing
from nanovllm.server.generation import Generation, add_all, respond
from nanovllm.server.metrics import Metrics
from nanovllm.server.protocol import ChatReply, ChatRequest, CompletionReply, CompletionRequest
from nanovllm.text.chat import num_characters

MAX_BODY_BYTES = 4 * 2**20
COMPLETION_MAX_TOKENS = 16  # OpenAI's default


def build_app(
    llm: AsyncLLM, *, model_name: str, api_key: str | None = None, max_body_bytes: int = MAX_BODY_BYTES
) -> FastAPI:
    """The server as an ASGI application. It owns `llm`, and shuts it down when it is shut down itself."""
    if llm.llm.tokenizer is None:
        raise ValueError("a server needs the tokenizer; leave skip_tokenizer_init out")
    tokenizer, config, defaults = llm.llm.tokenizer, llm.llm.config, llm.llm.sampling_defaults
    assert config.max_model_len
    most_characters = config.max_model_len * max(map(len, tokenizer.fast.get_vocab()))
    metrics = Metrics(llm)
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await llm.shutdown(drain=False)  # the answers that were waited for are complete by now

    # No pages with documentation: they load their scripts from elsewhere.
    app = FastAPI(title="nanovllm", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(Guard, api_key=api_key, max_body_bytes=max_body_bytes)
    errors.install(app)

    def check_model(name: str | None) -> None:
        if name is not None and name != model_name:
            raise ApiError(404, f"there is no model {name[:100]!r} here, only {model_name!r}", code="model_not_found")

    def check_length(num_characters: int, param: str) -> None:
        """Before a text is tokenized, which takes seconds for the largest body."""
        if num_characters > most_characters:
            what = f"{num_characters} characters are more than max_model_len={config.max_model_len} tokens can hold"
            raise ApiError(400, f"{what}; shorten the prompt", param=param)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        check_model(body.model)
        prompts = body.prompts()
        check_length(max(len(prompt.get("prompt", "")) for prompt in prompts), "prompt")
        with refusing():
            max_tokens = body.max_tokens or defaults.get("max_tokens", COMPLETION_MAX_TOKENS)
            params = body.sampling_params(max_tokens, body.logprobs, defaults)
            streams = await asyncio.to_thread(add_all, llm, prompts, params, body.priority)
        reply = CompletionReply(model_name, body.logprobs)
        generation = Generation(streams, body.n, reply, metrics)
        return await respond(generation, request, body.stream, body.stream_options.include_usage)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        check_model(body.model)
        messages = [message.model_dump() for message in body.messages]
        check_length(sum(map(num_characters, messages)), "messages")
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        try:
            token_ids = await asyncio.to_thread(tokenizer.encode_chat, messages, body.add_generation_prompt)
        except ValueError as error:  # the template's own reason, above all
            raise ApiError(400, str(error), param="messages") from error
        with refusing():
            room = room_for(len(token_ids))
            max_tokens = body.max_completion_tokens or body.max_tokens or min(defaults.get("max_tokens", room), room)
            params = body.sampling_params(max_tokens, num_logprobs, defaults)
            prompt = {"prompt_token_ids": token_ids, "cache_salt": body.cache_salt}
            streams = await asyncio.to_thread(add_all, llm, [prompt], params, body.priority)
        generation = Generation(streams, body.n, ChatReply(model_name, num_logprobs), metrics)
        return await respond(generation, request, body.stream, body.stream_options.include_usage)

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

    return app


class Guard:
    """Settles, before a request is read, who may ask and how much a body may hold: 401 for `/v1/...` without the key,
    413 for a body of more than `max_body_bytes`, announced or not."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int) -> None:
        self.app = app
        self.api_key = None if api_key is None else api_key.encode()
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        too_large = ApiError(413, f"the body has more than {self.max_body_bytes} bytes", code="body_too_large")
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_body_bytes:
                raise too_large
            return message

        if not self._may_ask(scope["path"], headers.get(b"authorization", b"")):
            message = "no or a wrong API key; send 'Authorization: Bearer KEY'"
            error = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            await error_response(error)(scope, receive, send)
        elif int(headers.get(b"content-length", b"0")) > self.max_body_bytes:
            await error_response(too_large)(scope, receive, send)
        else:
            await self.app(scope, counted, send)

    def _may_ask(self, path: str, authorization: bytes) -> bool:
        if self.api_key is None or not path.startswith("/v1"):
            return True
        scheme, _, key = authorization.partition(b" ")  # its case does not matter: RFC 9110
        return scheme.lower() == b"bearer" and compare_digest(key.strip(), self.api_key)
