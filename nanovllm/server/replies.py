"""From outputs to the JSON of OpenAI's two text endpoints, whole or as the chunks of a stream."""

import time
from typing import Any, Protocol
from uuid import uuid4

from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput

Json = dict[str, Any]


class Usage:
    """Tokens of all outputs of a request, added up from deltas or taken from whole outputs."""

    def __init__(self) -> None:
        self.prompt: dict[int, int] = {}  # of each prompt, by its index in the request
        self.cached: dict[int, int] = {}
        self.completion = 0

    def add(self, prompt: int, output: RequestOutput) -> None:
        self.prompt[prompt] = len(output.prompt_token_ids)
        self.cached[prompt] = output.num_cached_tokens
        self.completion += sum(len(choice.token_ids) for choice in output.outputs)

    def json(self) -> Json:
        prompt = sum(self.prompt.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion,
            "total_tokens": prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


class Reply(Protocol):
    """One endpoint's way to say things. `index` numbers the choices of all prompts."""

    def opening(self, index: int) -> Json | None:
        """What a stream says of a choice before its first text."""
        ...

    def choice(self, index: int, choice: CompletionOutput, streamed: bool) -> Json: ...
    def envelope(self, choices: list[Json], streamed: bool) -> Json: ...


def likeliest(entry: dict[int, Logprob], n: int) -> list[Logprob]:
    """The n likeliest tokens of a position, best first; `entry` has the chosen one as well, wherever it ranks."""
    ranked = sorted(entry.values(), key=lambda item: item.rank or 0)
    return [item for item in ranked if (item.rank or 0) <= n][:n]


class CompletionReply:
    def __init__(self, model: str, num_logprobs: int | None) -> None:
        self.model, self.num_logprobs = model, num_logprobs
        self.id, self.created = f"cmpl-{uuid4().hex}", int(time.time())
        self.offsets: dict[int, int] = {}  # of each choice: characters of the tokens so far

    def opening(self, index: int) -> Json | None:
        return None

    def choice(self, index: int, choice: CompletionOutput, streamed: bool) -> Json:
        logprobs = None if choice.logprobs is None else self._logprobs(index, choice.token_ids, choice.logprobs)
        ended = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return {"index": index, "text": choice.text, "logprobs": logprobs} | ended

    def _logprobs(self, index: int, token_ids: list[int], entries: list[dict[int, Logprob]]) -> Json:
        columns: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            chosen, offset = entry[token_id], self.offsets.get(index, 0)
            text = chosen.decoded_token or ""
            self.offsets[index] = offset + len(text)
            top: dict[str, float] = {}
            for item in likeliest(entry, self.num_logprobs or 0):
                top.setdefault(item.decoded_token or "", item.logprob)  # several may look alike: the best counts
            for column, value in zip(columns.values(), (text, chosen.logprob, top, offset), strict=True):
                column.append(value)
        return columns

    def envelope(self, choices: list[Json], streamed: bool) -> Json:
        kind = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return kind | {"choices": choices}


class ChatReply:
    def __init__(self, model: str, num_logprobs: int | None) -> None:
        self.model, self.num_logprobs = model, num_logprobs
        self.id, self.created = f"chatcmpl-{uuid4().hex}", int(time.time())

    def opening(self, index: int) -> Json | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, choice: CompletionOutput, streamed: bool) -> Json:
        said = {"delta": {"content": choice.text}} if streamed else {"message": self._message(choice.text)}
        logprobs = None if choice.logprobs is None else {"content": self._logprobs(choice.token_ids, choice.logprobs)}
        ended = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return {"index": index, "logprobs": logprobs} | said | ended

    def _message(self, text: str) -> Json:
        return {"role": "assistant", "content": text, "refusal": None}

    def _logprobs(self, token_ids: list[int], entries: list[dict[int, Logprob]]) -> list[Json]:
        return [
            self._token(entry[token_id])
            | {"top_logprobs": [self._token(item) for item in likeliest(entry, self.num_logprobs or 0)]}
            for token_id, entry in zip(token_ids, entries, strict=True)
        ]

    def _token(self, item: Logprob) -> Json:
        text = item.decoded_token or ""
        # A token that is part of a character has bytes that its text does not show.
        return {"token": text, "logprob": item.logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    def envelope(self, choices: list[Json], streamed: bool) -> Json:
        kind = "chat.completion.chunk" if streamed else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
