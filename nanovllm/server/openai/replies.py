"""The JSON of answers to completions and chats, whole or streamed, and the usage in these answers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprob
from nanovllm.server.openai.protocol import Json
from nanovllm.text.parts import Answer, Part


@dataclass
class Usage:
    """The number of tokens of a request: those of its prompts, and those of its outputs, counted as they come."""

    num_prompt_tokens: int
    tells_cached_tokens: bool
    cached: dict[int, int] = field(default_factory=dict)  # of each prompt, by its index in the request
    completion: int = 0

    def add(self, prompt: int, output: RequestOutput) -> None:
        self.cached[prompt] = output.num_cached_tokens
        self.completion += sum(len(choice.token_ids) for choice in output.outputs)

    def json(self) -> Json:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.completion,
            "total_tokens": self.num_prompt_tokens + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())} if self.tells_cached_tokens else None,
        }


def likeliest(entry: dict[int, Logprob], n: int) -> list[tuple[int, Logprob]]:
    """The n likeliest tokens of a position with their ids, best first. `entry` may have one token more: the chosen
    token, whatever its rank."""
    ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)
    return [(token_id, item) for token_id, item in ranked if (item.rank or 0) <= n][:n]


def top_by_text(entry: dict[int, Logprob], n: int) -> dict[str, float]:
    """OpenAI's map from the texts of the n likeliest tokens to log-probabilities. No token is missing: a token gets the
    key "token_id:N" (vLLM's notation) if it has no text, as a part of a character, or if a likelier token has the same
    text."""
    top: dict[str, float] = {}
    for token_id, item in likeliest(entry, n):
        text = item.decoded_token
        top[f"token_id:{token_id}" if not text or text in top else text] = item.logprob
    return top


class CompletionReply:
    """The form of the answers to completions. `index` numbers the choices of all prompts.

    prompts_in_choices: true if each choice has the token ids of its prompt; false if the whole answer has them.
    splits: whether answers may have other parts than content.
    """

    prompts_in_choices, splits = True, False

    def __init__(self, model: str, num_logprobs: int | None, request_id: str) -> None:
        self.model, self.num_logprobs = model, num_logprobs
        self.id, self.created = f"cmpl-{request_id}", int(time.time())

    def opening(self, index: int) -> Json | None:
        """What a stream sends for a choice before its first text."""
        return None

    def parts(self, index: int, choice: CompletionOutput) -> list[Part]:
        """The parts that the new text of a choice completes. Call this once for each output of the choice."""
        return [Part("content", choice.text)]

    def choice(self, index: int, choice: CompletionOutput, parts: Sequence[Part], streamed: bool) -> Json:
        logprobs = None if choice.logprobs is None else self._logprobs(choice.token_ids, choice.logprobs)
        ended = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return {"index": index, "text": text_of(parts, "content"), "logprobs": logprobs} | ended

    def _logprobs(self, token_ids: list[int], entries: Sequence[dict[int, Logprob]]) -> Json:
        columns: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            chosen = entry[token_id]
            offset = chosen.text_offset if isinstance(chosen, TokenLogprob) else 0
            values = chosen.decoded_token or "", chosen.logprob, top_by_text(entry, self.num_logprobs or 0), offset
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
        return columns

    def envelope(self, choices: list[Json], streamed: bool) -> Json:
        kind = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return kind | {"choices": choices}


class ChatReply:
    """The form of chat answers, as `CompletionReply`.

    make_answer:  makes the reader of one answer; None if an answer is content and nothing else.
    """

    prompts_in_choices = False

    def __init__(
        self, model: str, num_logprobs: int | None, request_id: str, make_answer: Callable[[], Answer] | None
    ) -> None:
        self.model, self.num_logprobs, self.make_answer = model, num_logprobs, make_answer
        self.id, self.created = f"chatcmpl-{request_id}", int(time.time())
        self.splits = make_answer is not None
        self._answers: dict[int, Answer] = {}  # by choice
        self._callers: set[int] = set()  # choices that call a tool

    def opening(self, index: int) -> Json | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def parts(self, index: int, choice: CompletionOutput) -> list[Part]:
        if self.make_answer is None:
            return [Part("content", choice.text)]
        answer = self._answers.get(index) or self._answers.setdefault(index, self.make_answer())
        parts = answer.feed(choice.text, choice.finished())
        if any(part.kind == "call" for part in parts):
            self._callers.add(index)
        return parts

    def choice(self, index: int, choice: CompletionOutput, parts: Sequence[Part], streamed: bool) -> Json:
        said = {"delta": delta(parts)} if streamed else {"message": message(parts)}
        logprobs = None if choice.logprobs is None else {"content": self._logprobs(choice.token_ids, choice.logprobs)}
        reason = "tool_calls" if choice.finish_reason == "stop" and index in self._callers else choice.finish_reason
        return (
            {"index": index, "logprobs": logprobs} | said | {"finish_reason": reason, "stop_reason": choice.stop_reason}
        )

    def _logprobs(self, token_ids: list[int], entries: Sequence[dict[int, Logprob]]) -> list[Json]:
        return [
            self._token(entry[token_id])
            | {"top_logprobs": [self._token(item) for _, item in likeliest(entry, self.num_logprobs or 0)]}
            for token_id, entry in zip(token_ids, entries, strict=True)
        ]

    def _token(self, item: Logprob) -> Json:
        raw = list(item.raw) if isinstance(item, TokenLogprob) else None
        return {"token": item.decoded_token or "", "logprob": item.logprob, "bytes": raw}

    def envelope(self, choices: list[Json], streamed: bool) -> Json:
        kind = "chat.completion.chunk" if streamed else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


Reply = CompletionReply | ChatReply


def text_of(parts: Sequence[Part], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def delta(parts: Sequence[Part]) -> Json:
    """What a chunk of a stream adds to a message. Each tool call has one entry, with id and name if the call begins."""
    calls: dict[int, Json] = {}  # by number
    for part in parts:
        if part.call is None:
            continue
        if part.kind == "call":
            begun = {"id": new_call_id(), "type": "function", "function": {"name": part.text, "arguments": ""}}
            calls[part.call] = {"index": part.call} | begun
        else:
            entry = calls.setdefault(part.call, {"index": part.call, "function": {"arguments": ""}})
            entry["function"]["arguments"] += part.text
    content, thought = text_of(parts, "content"), text_of(parts, "reasoning")
    said: Json = {"reasoning": thought, "reasoning_content": thought} if thought else {}
    said |= {"content": content} if content or not (thought or calls) else {}
    return said | ({"tool_calls": list(calls.values())} if calls else {})


def message(parts: Sequence[Part]) -> Json:
    """A whole message. Its content is null if the message has only reasoning or tool calls."""
    said = delta(parts)
    calls = [{name: value for name, value in call.items() if name != "index"} for call in said.pop("tool_calls", [])]
    return {"role": "assistant", "content": None, "refusal": None} | said | ({"tool_calls": calls} if calls else {})


def new_call_id() -> str:
    return f"call_{uuid4().hex[:24]}"
