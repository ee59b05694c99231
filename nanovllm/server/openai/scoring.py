"""Answers about the prompt itself: OpenAI's `echo` of completions, and vLLM's `prompt_logprobs`."""

from collections.abc import Sequence

from nanovllm.outputs import Logprob
from nanovllm.server.errors import ApiError
from nanovllm.server.openai.protocol import Json
from nanovllm.server.openai.replies import likeliest, top_by_text
from nanovllm.text.token_texts import TextStream, TokenCursor, TokenTexts

MOST_SCORES = 2**18  # log-probabilities in one answer, all of which are in memory at once
LEAST = -9999.0  # the smallest log-probability, as in vLLM: JSON has no infinity
PromptLogprobs = Sequence[dict[int, Logprob] | None]  # one entry per token of the prompt; None for the first token


class Echo:
    """A prompt as it stands before each of its outputs.

    text: the client's own text; for token ids, the text that they spell, special tokens included.
    """

    def __init__(self, texts: TokenTexts, prompt: str | None, token_ids: list[int], num_logprobs: int | None) -> None:
        """`prompt` is the text that became `token_ids`; None if the client sent ids. `num_logprobs` is None if no
        log-probabilities are wanted."""
        self.token_ids, self.num_logprobs = token_ids, num_logprobs
        stream, cursor = TextStream(texts, [], False), TokenCursor(texts, [], False)  # special tokens are text here
        self.tokens: list[str] = []
        offsets: list[int] = []
        for token_id in token_ids:
            self.tokens.append(cursor.look(token_id)[0])
            offsets.append(cursor.offset)
            cursor.go(token_id)
        spelled = stream.feed(token_ids) + stream.flush()
        self.text = spelled if prompt is None else prompt
        # If the tokenizer has put a BOS before the client's text, the BOS is a token, but no part of the text.
        before = len(spelled) - len(self.text) if spelled.endswith(self.text) else 0
        self.offsets = [min(max(offset - before, 0), len(self.text)) for offset in offsets]

    def put_before(self, choice: Json, found: PromptLogprobs | None) -> None:
        """Put the prompt before the first JSON of a choice. `found`: the prompt's log-probabilities, if wanted."""
        choice["text"] = self.text + choice["text"]
        if self.num_logprobs is not None and found is not None:
            own, output = self._columns(found, self.num_logprobs), choice["logprobs"]
            choice["logprobs"] = {name: own[name] + output[name] for name in own}

    def shift(self, choice: Json) -> None:
        """Make the text offsets in the JSON of a choice count from the beginning of the prompt."""
        if logprobs := choice["logprobs"]:
            logprobs["text_offset"] = [offset + len(self.text) for offset in logprobs["text_offset"]]

    def _columns(self, found: PromptLogprobs, num_logprobs: int) -> Json:
        columns: Json = {"tokens": list(self.tokens), "token_logprobs": [], "top_logprobs": []}
        for token_id, entry in zip(self.token_ids, found, strict=True):
            columns["token_logprobs"].append(None if entry is None else max(entry[token_id].logprob, LEAST))
            columns["top_logprobs"].append(None if entry is None else top_by_text(entry, num_logprobs))
        return columns | {"text_offset": list(self.offsets)}


def check_scores(n: int | None, prompts: Sequence[Sequence[int]], times: int) -> None:
    """Raise ApiError if an answer would hold too many log-probabilities of prompts: n + 1 per token of the prompts.

    times: how often the answer has those of each prompt.
    """
    number = 0 if n is None else (n + 1) * sum(map(len, prompts)) * times
    if number > MOST_SCORES:
        what = f"these are {number} log-probabilities of prompts, and one answer holds at most {MOST_SCORES}"
        remedy = "send fewer prompts at once, or ask for fewer tokens or choices"
        raise ApiError(400, f"{what}; {remedy}", param="prompt_logprobs")


def prompt_logprobs(token_ids: Sequence[int], found: PromptLogprobs, n: int) -> list[Json | None]:
    """vLLM's form: for each token of the prompt, its own log-probability and those of the n likeliest, by token id."""
    listed: list[Json | None] = []
    for token_id, entry in zip(token_ids, found, strict=True):
        if entry is None:
            listed.append(None)
            continue
        shown = {token_id: entry[token_id], **dict(likeliest(entry, n))}
        listed.append(
            {
                str(id): {"logprob": max(item.logprob, LEAST), "rank": item.rank, "decoded_token": item.decoded_token}
                for id, item in shown.items()
            }
        )
    return listed
