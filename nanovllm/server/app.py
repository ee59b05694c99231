"""The application: its routes, and who may ask."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

from nanovllm import __version__
from nanovllm.sampling_params import SamplingParams
from nanovllm.server import errors
from nanovllm.server.errors import ApiError, answering, refusing
from nanovllm.server.interface import Counted, Engine, Meters
from nanovllm.server.metrics import Metrics
from nanovllm.server.middleware import Guard, Watch
from nanovllm.server.openai.answers import AnswerForm, MakeAnswer, check_tools
from nanovllm.server.openai.chat import ChatMessage, ChatRequest, TokenizeRequest
from nanovllm.server.openai.generation import Generation, add_all, as_json, quoted, respond
from nanovllm.server.openai.protocol import CompletionRequest, DetokenizeRequest, GenerationRequest
from nanovllm.server.openai.replies import ChatReply, CompletionReply, Reply
from nanovllm.server.openai.response_items import ResponseGeneration
from nanovllm.server.openai.responses import ResponsesRequest
from nanovllm.server.openai.scoring import Echo, check_scores
from nanovllm.server.openai.tolerance import Unknown
from nanovllm.server.options import AppOptions
from nanovllm.server.page import page
from nanovllm.text.chat import num_characters
from nanovllm.text.render import Renderer, TemplateTooSlow
from nanovllm.text.token_texts import TokenTexts

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
SHORT_TEXT = 256  # characters: tokenizing so few takes less time than starting a thread


def build_app(
    llm: Engine,
    *,
    model_name: str,
    options: AppOptions = AppOptions(),  # noqa: B008 (frozen)
    meters: Meters | None = None,
) -> FastAPI:
    """The server as an ASGI application. It owns `llm`, and shuts it down when it is shut down itself.

    meters: who counts the requests; None, for an AsyncLLM: this application.
    `app.state.refused(reason)` counts a connection that was closed before it was a request.
    """
    if llm.tokenizer is None:
        raise ValueError("a server needs the tokenizer; leave skip_tokenizer_init out")
    tokenizer, config, defaults = llm.tokenizer, llm.config, llm.sampling_defaults
    texts = TokenTexts(tokenizer)
    assert config.max_model_len
    most_characters = config.max_model_len * max(map(len, tokenizer.fast.get_vocab()))
    meters, ignored = meters or Metrics(cast(Counted, llm), model_name), Unknown()
    if options.chat_template is not None:
        tokenizer.hf.chat_template = options.chat_template
    tokenizer.renderer = renderer = Renderer()  # whoever made the checkpoint may be no friend
    form = AnswerForm(tokenizer, options.tool_parser, options.reasoning_parser)
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

    def check(body: GenerationRequest) -> None:
        check_model(body.model)
        if body.priority and not options.allow_priority:
            message = "this server lets no client go first; leave priority out, or start it with --allow-priority"
            raise ApiError(400, message, param="priority")
        ignored.note(body.model_extra)
        ignored.note(body.stream_options.model_extra, "stream_options.")

    def salt_of(body: GenerationRequest, request: Request) -> str | None:
        """The client's, within that of its key."""
        key = getattr(request.state, "salt", None)
        return body.cache_salt if key is None else f"{key}/{body.cache_salt or ''}"

    async def encode_texts(prompts: list[str | list[int]], add_special_tokens: bool = True) -> list[list[int]]:
        """Those that are token ids already stay as they are."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            check_length(len(text), "prompt")

        def encode() -> list[list[int]]:
            return [tokenizer.encode(p, add_special_tokens) if isinstance(p, str) else p for p in prompts]

        short = not texts or (len(texts) == 1 and len(texts[0]) <= SHORT_TEXT)
        return encode() if short else await asyncio.to_thread(encode)

    async def encode_chat(
        body: ChatRequest | TokenizeRequest, messages: list[ChatMessage], tools: list[dict[str, Any]], field: str
    ) -> list[int]:
        tools = tools if form.shows_tools else []  # a grammar knows them all the same
        for message in messages:
            ignored.note(message.model_extra, "messages[].")
            for part in [] if isinstance(message.content, str) else message.content:
                ignored.note(part.model_extra, "messages[].content[].")
        given = [message.for_template() for message in messages]
        of_tools = len(json.dumps(tools)) if tools else 0
        check_length(of_tools, "tools")
        check_length(sum(map(num_characters, given)) + of_tools, field)
        variables, begin = body.chat_template_kwargs, body.add_generation_prompt
        if body.continue_final_message:
            variables = {**variables, "continue_final_message": True}
        try:
            return await asyncio.to_thread(tokenizer.encode_chat, given, begin, tools, **variables)
        except TemplateTooSlow as error:
            raise ApiError(503, str(error), code="template_too_slow", headers={"Retry-After": "1"}) from error
        except ValueError as error:  # the template's own reason, above all
            raise ApiError(400, str(error), param=field) from error

    def truncated(token_ids: list[int], body: GenerationRequest, max_tokens: int) -> list[int]:
        """The end of a prompt, as long as the client wants it: -1 is as long as it may be."""
        if body.truncate_prompt_tokens is None:
            return token_ids
        most = room_for(max(max_tokens, 1)) if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
        return token_ids[-most:]

    async def answer(
        body: GenerationRequest,
        request: Request,
        prompts: list[list[int]],
        params: SamplingParams,
        reply: Reply,
        echoed: Sequence[str | None] = (),
    ) -> Response:
        """`echoed`: the texts of the prompts, where outputs begin with these; None for a prompt without a text."""
        check_scores(params.prompt_logprobs, prompts, times=body.n if reply.prompts_in_choices else 1)
        salt, field = salt_of(body, request), "prompt" if reply.prompts_in_choices else "messages"
        queued = await add_all(llm, prompts, params, salt, body.priority, field, body.field_of_structure())

        def make_echoes() -> list[Echo]:
            """In a thread: long prompts take a while."""
            return [Echo(texts, text, ids, params.logprobs) for text, (ids, _) in zip(echoed, queued, strict=True)]

        echoes = await asyncio.to_thread(make_echoes) if echoed else []
        generation = Generation(body, queued, reply, meters, options.tells_cached_tokens, echoes)
        return await respond(generation, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        check(body)
        wanted = body.most_tokens()
        max_tokens = defaults.get("max_tokens", COMPLETION_MAX_TOKENS) if wanted is None else wanted
        with refusing("prompt", body.field_of_structure()):
            params = body.sampling_params(max_tokens, body.logprobs, defaults)
        given = body.prompts()
        prompts = [truncated(prompt, body, max_tokens) for prompt in await encode_texts(given)]
        whole = body.truncate_prompt_tokens is None
        echoed = [prompt if whole and isinstance(prompt, str) else None for prompt in given] if body.echo else []
        reply = CompletionReply(model_name, body.logprobs, request.state.request_id)
        return await answer(body, request, prompts, params, reply, echoed)

    async def prepared(
        body: ChatRequest, field: str, structure: str, field_of_tools: str
    ) -> tuple[list[int], SamplingParams, MakeAnswer | None]:
        """The prompt of a chat, its parameters, and what reads the answer.

        field, structure:  the fields that the messages and the structure of the output come from.
        field_of_tools:    the field of a tool that has its parameters.
        """
        check(body)
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        wanted = body.most_tokens()
        encoded = await encode_chat(body, body.messages, body.shown_tools(), field)
        token_ids = truncated(encoded, body, wanted or 1)
        room = room_for(len(token_ids))
        max_tokens = min(defaults.get("max_tokens", room), room) if wanted is None else wanted
        with refusing(field, structure):
            params = body.sampling_params(max_tokens, num_logprobs, defaults)
            if (tools := body.callable()) and params.structured_outputs is not None:  # before it is a part of a grammar
                await asyncio.to_thread(llm.check, {"prompt_token_ids": token_ids}, params)
            params, make_answer = form.adapt(body, token_ids, params)
        if tools and params.structured_outputs is not None:
            await check_tools(llm, [function.tool() for function in tools], token_ids, params, field_of_tools)
        return token_ids, params, make_answer

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        token_ids, params, make_answer = await prepared(
            body, "messages", body.field_of_structure(), "function.parameters"
        )
        reply = ChatReply(model_name, params.logprobs, request.state.request_id, make_answer)
        return await answer(body, request, [token_ids], params, reply)

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        ignored.note(body.model_extra)
        token_ids, params, make_answer = await prepared(body.chat, "input", "text.format", "parameters")
        salt, number = salt_of(body.chat, request), request.state.request_id
        queued = await add_all(llm, [token_ids], params, salt, body.priority, "input", "text.format")
        reply = ChatReply(model_name, None, number, make_answer)
        name, tells_cached = f"resp_{number}", options.tells_cached_tokens
        generation = ResponseGeneration(
            body, queued, reply, name, meters, tells_cached, lambda text: len(tokenizer.encode(text, False))
        )
        return await respond(generation, request)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        check_model(body.model)
        ignored.note(body.model_extra)
        if body.messages is not None:
            tools = [tool.function.for_template() for tool in body.tools]
            tokens = await encode_chat(body, body.messages, tools, "messages")
        else:
            [tokens] = await encode_texts([body.prompt or ""], body.add_special_tokens)

        def written() -> bytes:
            """In a thread, and piece by piece: others would have to wait for a list that is written in one go."""
            texts = tokenizer.hf.convert_ids_to_tokens(tokens) if body.return_token_strs else None
            shown = as_json({"count": len(tokens), "max_model_len": config.max_model_len})
            listed = ",".join(str(token) for token in tokens)
            strs = "null" if texts is None else f"[{','.join(quoted(text) for text in texts)}]"
            return f'{shown[:-1]},"tokens":[{listed}],"token_strs":{strs}}}'.encode()

        return Response(await asyncio.to_thread(written), media_type="application/json")

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        check_model(body.model)
        ignored.note(body.model_extra)
        size = max(llm.vocab_size, tokenizer.fast.get_vocab_size())

        def written() -> bytes:
            if wrong := [token for token in body.tokens if not 0 <= token < size]:
                raise ApiError(400, f"tokens has {wrong[0]}, and the vocabulary 0 to {size - 1}", param="tokens")
            return as_json({"prompt": tokenizer.decode(body.tokens, False)}).encode()

        return Response(await asyncio.to_thread(written), media_type="application/json")

    def room_for(num_prompt_tokens: int) -> int:
        """As many tokens as the model's context and the KV pool allow one sequence."""
        assert config.max_model_len and config.num_kv_blocks and config.kvcache_block_size
        longest = min(config.max_model_len, config.num_kv_blocks * config.kvcache_block_size + 1)
        return max(longest - num_prompt_tokens, 1)

    def model_card() -> dict[str, Any]:
        kind = {"id": model_name, "object": "model", "created": started, "owned_by": "nanovllm"}
        return kind | {"max_model_len": config.max_model_len}

    @app.get("/v1/models/", include_in_schema=False)  # otherwise it would ask for a model without a name
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name)
        return model_card()

    shown = page()

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        return shown

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.head("/health", include_in_schema=False)
    @app.post("/ping", include_in_schema=False)
    @app.get("/ping")
    @app.get("/health")
    async def health() -> dict[str, str]:
        with answering():
            llm.check_health()
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics_text() -> Response:
        with answering():
            text = await meters.scrape()
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    # The last one is the outermost. Answers to pages of other origins, which may hold no key, need no key.
    app.add_middleware(Guard, options=options)
    if options.allowed_origins:
        more: Any = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["X-Request-Id"]}
        app.add_middleware(CORSMiddleware, allow_origins=options.allowed_origins, **more)
    paths = {path for route in app.routes if "{" not in (path := getattr(route, "path", "{"))}
    app.add_middleware(Watch, meters=meters, paths=paths, access_log=options.access_log)
    app.state.refused = partial(meters.count, "http_connections_refused")
    return app
