"""E2: what lies behind the end of a sequence has no say, and neither has a guess that is not accepted.

A guess whose embedding is NaN makes all logits behind it NaN, and its keys and values.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.engine.sequence import Sequence
from nanovllm.runner.draft import DraftModel
from nanovllm.runner.model_runner import ModelRunner

STORY_MODEL, DRAFT = (Path(__file__).parents[2] / "assets" / name for name in ("story_model", "story_draft"))
TEXTS = ["Once upon a time there was a fox", "In the village of", "The bear said: what a fine boat"]
BAD = 3000  # a token that none of the outputs has
OPTIONS: dict[str, Any] = {"num_kv_blocks": 60, "kvcache_block_size": 4, "max_model_len": 200}
SPECULATIVE = {"ngram": {"method": "ngram", "k": 6, "n": 1}, "draft": {"model": DRAFT, "k": 6}}


def plant(llm: LLM) -> None:
    """Let the target compute NaN from the token BAD."""
    embed = llm.engine.executor.runner.target.model.embed_tokens
    embed.register_forward_hook(lambda _, ids, out: out.masked_fill((ids[0] == BAD)[:, None], float("nan")))


class Guess:
    """Guesses `right` tokens of what is known to come, and then BAD."""

    def __init__(self, known: dict[str, list[int]]) -> None:
        self.known, self.right = known, 0

    def coming(self, request_id: str, first: int, k: int) -> list[int | None]:
        tokens: list[int | None] = [*self.known[request_id][first : first + self.right]]
        return (tokens + [BAD] * k)[:k]

    def propose(self, seq: Sequence, k: int) -> list[int | None]:
        return self.coming(str(int(seq.request_id) % len(TEXTS)), seq.num_output_tokens, k)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(STORY_MODEL, **OPTIONS) as llm:
        yield llm


def ask(llm: LLM, params: Any) -> list[Any]:
    return [output.outputs[0] for output in llm.generate(TEXTS, params, use_tqdm=False)]


@pytest.fixture(scope="module", params=["ngram", pytest.param("draft", marks=pytest.mark.slow)])
def guessing(request: pytest.FixtureRequest, plain: LLM) -> Iterator[tuple[LLM, Guess]]:
    long = ask(plain, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    guess = Guess({str(i): choice.token_ids for i, choice in enumerate(long)})
    with LLM(STORY_MODEL, **OPTIONS, speculative=SPECULATIVE[request.param]) as llm:
        plant(llm)
        runner: ModelRunner = llm.engine.executor.runner
        if request.param == "ngram":
            assert llm.engine.scheduler.proposer is not None
            llm.engine.scheduler.proposer = guess
        else:
            steer(runner, llm, guess)
        yield llm, guess


def steer(runner: ModelRunner, llm: LLM, guess: Guess) -> None:
    """Have the draft model guess so, for certain: what it samples is written over, in its row and in its q."""
    draft, sample = runner.guesses, DraftModel._sample
    assert isinstance(draft, DraftModel)

    def steered(self: Any, logits: Tensor, rows: Tensor, positions: Tensor, *more: Any) -> Any:
        guesses, q = sample(draft, logits, rows, positions, *more)
        by_row = {seq.row: seq for seq in llm.engine.scheduler.running}
        for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            seq = by_row[row]
            request_id, first = str(int(seq.request_id) % len(TEXTS)), seq.num_output_tokens
            guesses[i] = guess.coming(request_id, first, 8)[position - len(seq.token_ids)]
        runner.rows.token_ids[rows, positions] = guesses.int()
        return guesses, q if q is None else q.zero_().scatter_(1, guesses[:, None], 1)

    draft._sample = steered.__get__(draft)  # type: ignore[method-assign]


@pytest.mark.parametrize("right", [1, *(pytest.param(right, marks=pytest.mark.slow) for right in (0, 3, 6))])
def test_ends_and_tokens_are_those_without_guesses(plain: LLM, guessing: tuple[LLM, Guess], right: int) -> None:
    llm, guess = guessing
    guess.right = right
    long = ask(plain, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    ends: list[dict[str, Any]] = [
        {},
        {"stop": long[0].text[9:13]},
        {"stop": long[1].text[20:22], "logprobs": 2, "include_stop_str_in_output": True},
        {"stop_token_ids": [long[2].token_ids[5]]},
        {"stop_token_ids": [long[0].token_ids[7]], "logprobs": 0, "min_tokens": 3},
        {"top_p": 0.9, "repetition_penalty": 1.3, "stop_token_ids": long[1].token_ids[4:6], "logprobs": 1},
    ]
    llm.engine.eos_token_ids = plain.engine.eos_token_ids = frozenset([long[1].token_ids[6]])
    ends.append({"ignore_eos": False})
    for end in ends[2:4] if right == 1 else ends:
        params = SamplingParams(**greedy | end)
        expected, found = ask(plain, params), ask(llm, params)
        for a, b in zip(expected, found, strict=True):
            assert (a.finish_reason, a.stop_reason, a.token_ids) == (b.finish_reason, b.stop_reason, b.token_ids)
            assert a.text == b.text
            if a.logprobs is not None:
                assert [list(x) for x in a.logprobs] == [list(x) for x in b.logprobs]
                assert b.cumulative_logprob == pytest.approx(a.cumulative_logprob, abs=1e-3)
    blocks = llm.engine.scheduler.blocks
    assert blocks.num_free == blocks.num_blocks
    assert "stop" in {choice.finish_reason for choice in expected}
