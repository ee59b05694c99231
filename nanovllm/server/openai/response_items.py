"""The JSON of answers at /v1/responses: the items of an output, whole or as a stream of events."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from uuid import uuid4

from starlette.exceptions import HTTPException

from nanovllm.outputs import FinishReason
from nanovllm.server.interface import Meters, OutputStream
from nanovllm.server.openai.generation import Generation, as_json
from nanovllm.server.openai.protocol import Json
from nanovllm.server.openai.replies import ChatReply, new_call_id
from nanovllm.server.openai.responses import ResponsesRequest
from nanovllm.text.parts import Part

# By the type of an item: the type of its text, and what the events of the text have beside the text.
TEXTS: dict[str, tuple[str, Json]] = {"message": ("output_text", {"logprobs": []}), "reasoning": ("reasoning_text", {})}


class Items:
    """The items of one output: messages, function calls and reasoning. An item grows until the next item begins.

    `feed` and `end` return the events of their changes, without sequence numbers.
    """

    def __init__(self) -> None:
        self.items: list[Json] = []

    def feed(self, parts: Sequence[Part]) -> list[Json]:
        events: list[Json] = []
        for part in parts:
            if part.kind == "call":
                events += self.end() + self._begin(function_call(part.text))
            elif part.kind == "arguments":
                self.items[-1]["arguments"] += part.text
                events.append(self._event("response.function_call_arguments.delta") | {"delta": part.text})
            else:
                kind = "message" if part.kind == "content" else "reasoning"
                if not self._is_open(kind):
                    events += self.end() + self._begin(message() if kind == "message" else reasoning())
                    self.items[-1]["content"].append(new_text(kind))
                    added = {"part": new_text(kind)}
                    events.append(self._event("response.content_part.added") | {"content_index": 0} | added)
                self.items[-1]["content"][0]["text"] += part.text
                name, more = TEXTS[kind]
                events.append(self._event(f"response.{name}.delta") | {"content_index": 0, "delta": part.text} | more)
        return events

    def end(self, status: str = "completed") -> list[Json]:
        """End the open item, if an item is open."""
        if not self._is_open():
            return []
        item, events = self.items[-1], []
        item["status"] = status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._event("response.function_call_arguments.done") | done)
        else:
            [part], (name, more) = item["content"], TEXTS[item["type"]]
            events.append(self._event(f"response.{name}.done") | {"content_index": 0, "text": part["text"]} | more)
            events.append(self._event("response.content_part.done") | {"content_index": 0, "part": dict(part)})
        events.append({"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": dict(item)})
        return events

    def text(self, kind: str) -> str:
        return "".join(item["content"][0]["text"] for item in self.items if item["type"] == kind)

    def _is_open(self, kind: str | None = None) -> bool:
        last = self.items[-1] if self.items else {}
        return last.get("status") == "in_progress" and kind in (None, last["type"])

    def _begin(self, item: Json) -> list[Json]:
        self.items.append(item)
        added = {**item, "content": []} if "content" in item else dict(item)
        return [{"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": added}]

    def _event(self, kind: str) -> Json:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def message() -> Json:
    said = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant"}
    return said | {"status": "in_progress", "content": []}


def reasoning() -> Json:
    return {"id": f"rs_{uuid4().hex}", "type": "reasoning", "summary": [], "status": "in_progress", "content": []}


def function_call(name: str) -> Json:
    named = {"id": f"fc_{uuid4().hex}", "type": "function_call", "call_id": new_call_id(), "name": name}
    return named | {"arguments": "", "status": "in_progress"}


def new_text(kind: str) -> Json:
    text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return text if kind == "message" else {"type": "reasoning_text", "text": ""}


class ResponseGeneration(Generation):
    """The output of one request while the engine works on the request.

    reply:  splits the output into parts.
    count:  returns the number of tokens of a text.
    """

    ending = b""  # nothing: the last event tells the status

    def __init__(
        self,
        request: ResponsesRequest,
        queued: Sequence[tuple[list[int], OutputStream]],
        reply: ChatReply,
        response_id: str,
        meters: Meters,
        tells_cached_tokens: bool,
        count: Callable[[str], int],
    ) -> None:
        super().__init__(request.chat, queued, reply, meters, tells_cached_tokens)
        self.request, self.id, self.model, self.count = request, response_id, reply.model, count
        self.items = Items()
        self.created, self.num_events, self.status = int(time.time()), 0, "in_progress"

    async def whole(self) -> Json:
        async for _ in self._events():
            pass
        return self._response(self.status)

    async def stream_to(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        begun = self._response("in_progress")
        kinds = "response.created", "response.in_progress"
        await send(b"".join(self._event({"type": kind, "response": begun}) for kind in kinds))
        async for events in self._events():
            if events:
                await send(b"".join(map(self._event, events)))
        await send(self._event({"type": f"response.{self.status}", "response": self._response(self.status)}))

    def failed(self, error: HTTPException) -> bytes:
        self.items.end("incomplete")
        response = self._response("failed") | {"error": {"code": "server_error", "message": str(error.detail)}}
        return self._event({"type": "response.failed", "response": response})

    async def _events(self) -> AsyncIterator[list[Json]]:
        """The events of the items, as the outputs come; then the status is known. There is at least one item."""
        finish_reason: FinishReason | None = None
        async for output in self.streams[0]:
            for choice in self._seen(0, output).outputs:
                finish_reason = choice.finish_reason
                yield self.items.feed(self.reply.parts(0, choice))
        self.status = "incomplete" if finish_reason == "length" else "completed"
        events = [] if self.items.items else self.items.feed([Part("content", "")])
        yield events + self.items.end(self.status)

    def _event(self, data: Json) -> bytes:
        numbered = data | {"sequence_number": self.num_events}
        self.num_events += 1
        return f"event: {data['type']}\ndata: {as_json(numbered)}\n\n".encode()

    def _response(self, status: str) -> Json:
        request = self.request
        said = request.model_dump(by_alias=True, include=SHOWN)
        said["text"] = {"format": request.text.format.model_dump(by_alias=True, exclude_unset=True)}
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "model": self.model,
            "output": list(self.items.items),
            **said,
            "previous_response_id": None,
            "store": False,
            "background": False,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> Json:
        cached = sum(self.usage.cached.values()) if self.usage.tells_cached_tokens else 0
        thought = self.items.text("reasoning")
        return {
            "input_tokens": self.usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": self.usage.completion,
            "output_tokens_details": {"reasoning_tokens": self.count(thought) if thought else 0},
            "total_tokens": self.usage.num_prompt_tokens + self.usage.completion,
        }


# Fields of the request that the answer repeats.
SHOWN = set("instructions max_output_tokens metadata parallel_tool_calls temperature tool_choice tools top_p".split())
