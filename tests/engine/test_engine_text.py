"""Where the engine meets text: stop strings and what of the tokens is shown."""

from typing import Any

import pytest

from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.plan import TokenLogprobs
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import Logprob, RequestOutput, SpeculationStats
from nanovllm.sampling_params import SamplingParams
from tests.engine.helpers import BOTH, greedy_tokens, make
from tests.engine.shadow import EOS, VOCAB_SIZE, ShadowExecutor


class Letters:
    """A detokenizer of single letters that holds one back while it could begin the stop string."""

    def __init__(self, params: SamplingParams) -> None:
        self.stops = list(params.stop)
        self.text, self.held = "", ""
        self.stop_reason: str | None = None

    def append(self, token_id: int) -> str | None:
        assert self.stop_reason is None, "nothing is text behind a stop string"
        self.held += "abcdefgh"[token_id]
        self.stop_reason = next((stop for stop in self.stops if stop in self.held), None)
        if self.stop_reason is not None:
            self.text, self.held = self.text + self.held.split(self.stop_reason)[0], ""
        elif len(self.held) > 1:
            self.text, self.held = self.text + self.held[:-1], self.held[-1]
        return self.stop_reason

    def finish(self) -> None:
        self.text, self.held = self.text + self.held, ""

    def logprobs(self, chosen: int, found: TokenLogprobs) -> dict[int, Logprob]:
        return {id: Logprob(value, rank, "abcdefgh"[id]) for id, (value, rank) in found.items()}


def make_letters(prompt: list[int], params: SamplingParams) -> Any:
    return Letters(params)


class Knowing:
    """Guesses these tokens after the prompt."""

    def __init__(self, coming: list[int]) -> None:
        self.coming = coming

    def propose(self, seq: Sequence, k: int) -> list[int | None]:
        return [*self.coming[seq.num_output_tokens :][:k]]


def with_text(
    asynchronous: bool, prompt: list[int], coming: list[int] | None = None, **params: Any
) -> list[RequestOutput]:
    """`coming`: what to guess, all of it at once."""
    settings = EngineConfig(
        kvcache_block_size=2,
        num_kv_blocks=32,
        max_model_len=64,
        async_scheduling=asynchronous,
        speculative=None if coming is None else {"method": "ngram", "k": len(coming)},
    )
    executor = ShadowExecutor(settings)
    executor.engine = engine = LLMEngine(
        executor,
        settings,
        vocab_size=VOCAB_SIZE,
        eos_token_ids={EOS},
        make_detokenizer=make_letters,
    )
    if coming is not None:
        engine.scheduler.proposer = Knowing(coming)
    values = {"temperature": 0.0, "seed": 1, "ignore_eos": True, "max_tokens": 6} | params
    engine.add_request("a", prompt, SamplingParams(**values))
    outputs: list[RequestOutput] = []
    events: list[dict[str, Any]] = []
    engine.trace.on_event = events.append
    while engine.has_unfinished():
        outputs += engine.step()
    assert engine.scheduler.blocks.num_free == 32
    last = outputs[-1].outputs[0]  # the events say the same as the output
    assert [token for event in events if event["type"] == "token" for token in event["ids"]] == last.token_ids
    assert [event["reason"] for event in events if event["type"] == "finished"] == [last.finish_reason]
    assert engine.scheduler.speculation == (outputs[-1].metrics.speculation or SpeculationStats())
    return outputs


@BOTH
def test_a_stop_string_ends_the_output(asynchronous: bool) -> None:
    tokens = greedy_tokens([1, 2, 3], 6)
    letters = "".join("abcdefgh"[token] for token in tokens)
    whole = with_text(asynchronous, [1, 2, 3])[-1].outputs[0]
    assert (whole.text, whole.finish_reason) == (letters, "length")
    stop = letters[2:4]
    outputs = with_text(asynchronous, [1, 2, 3], stop=stop)
    last = outputs[-1].outputs[0]
    assert (last.text, last.finish_reason, last.stop_reason) == (letters[:2], "stop", stop)
    assert last.token_ids == tokens[:4]
    assert sum(output.finished for output in outputs) == 1


def test_what_is_accepted_behind_a_stop_string_is_not_counted() -> None:
    """As behind an end of text. Five guesses, all of them right, and the stop string ends in one of them; the sixth
    token is the model's own."""
    tokens = greedy_tokens([1, 2, 3], 6)
    for end in range(2, 7):
        stop = "".join("abcdefgh"[token] for token in tokens[end - 2 : end])
        output = with_text(False, [1, 2, 3], tokens[:5], stop=stop)[-1]
        assert output.outputs[0].token_ids == tokens[:end] and output.outputs[0].stop_reason == stop
        accepted = [1] * min(end, 5) + [0] * (5 - end)
        assert output.metrics.speculation == SpeculationStats(1, [1] * 5, accepted, end)


def test_a_stop_string_in_the_very_last_token_is_a_stop_and_not_a_length() -> None:
    letters = "".join("abcdefgh"[token] for token in greedy_tokens([1, 2, 3], 6))
    last = with_text(False, [1, 2, 3], stop=letters[4:6])[-1].outputs[0]
    assert (last.text, last.finish_reason, last.stop_reason) == (letters[:4], "stop", letters[4:6])


def test_a_token_that_stops_is_not_text_unless_asked_for() -> None:
    tokens = greedy_tokens([1, 2, 3], 6)
    first, letter = tokens[0], "abcdefgh"[tokens[0]]
    for include, text in (False, ""), (True, letter):
        output = with_text(False, [1, 2, 3], stop_token_ids=[first], include_stop_str_in_output=include)[-1].outputs[0]
        assert (output.text, output.token_ids, output.stop_reason) == (text, [first], first)


def test_the_candidates_of_a_position_are_shown_as_text() -> None:
    last = with_text(False, [1, 2, 3], logprobs=1)[-1].outputs[0]
    assert last.logprobs is not None
    assert "".join(p[t].decoded_token or "" for p, t in zip(last.logprobs, last.token_ids, strict=True)) == last.text


def test_stop_strings_without_text_are_refused() -> None:
    with pytest.raises(ValueError, match="stop_token_ids"):
        make().add([1], stop="x")
