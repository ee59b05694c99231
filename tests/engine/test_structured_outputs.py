"""Structured outputs of real models: every output matches, unless `max_tokens` cuts it, however the engine runs; and
whoever asks for nothing gets the tokens that they get without such neighbours."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, AsyncLLM, CompletionOutput, SamplingParams, StructuredOutputsParams
from nanovllm.text.grammars import TokenGrammars, TokenMatcher
from tests.engine.structured import (
    KINDS,
    SMALL,
    STORIES,
    asynchronous,
    check,
    generate,
    ids,
    llm,
    matches,
    mixed,
    model,
    story,
)

__all__ = ["asynchronous", "llm", "model", "story"]  # fixtures


def test_outputs_match_and_neighbours_notice_nothing(llm: LLM, asynchronous: LLM) -> None:
    asked = mixed(seed=1)
    found = generate(llm, asked)
    assert sum(choice.finish_reason == "stop" for output in found[1:-1] for choice in output.outputs) >= 4
    alone = llm.generate([STORIES[0], STORIES[len(asked) - 1]], [asked[0][1], asked[-1][1]], use_tqdm=False)
    assert ids([found[0], found[-1]]) == ids(alone)
    assert ids(generate(asynchronous, asked)) == ids(found)


def test_choices_of_a_request_have_matchers_of_their_own(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=7, temperature=3.0, structured_outputs=KINDS["regex"], max_tokens=60)
    [output] = llm.generate(STORIES[0], params, use_tqdm=False)
    check("regex", output)
    assert len({choice.text for choice in output.outputs}) >= 3


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    """As vLLM reports them: what a grammar forbids has its log-probability all the same."""
    params = SamplingParams(temperature=0, logprobs=1, structured_outputs=StructuredOutputsParams(choice=["Zzz"]))
    [choice] = llm.generate(STORIES[0], params, use_tqdm=False)[0].outputs
    assert choice.text == "Zzz" and choice.logprobs is not None
    ranks = [entry[token].rank or 0 for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
    assert max(ranks) > 1 and all(
        len(entry) == 2 - (rank == 1) for entry, rank in zip(choice.logprobs, ranks, strict=True)
    )


def test_filters_see_only_what_is_allowed(llm: LLM) -> None:
    """top_k=1 would leave nothing, were it applied first."""
    asked = [
        SamplingParams(temperature=t, top_k=k, seed=1, structured_outputs=KINDS["regex"]) for t, k in ((1, 1), (0, 0))
    ]
    one, greedy = llm.generate([STORIES[0]] * 2, asked, use_tqdm=False)
    check("regex", one)
    assert ids([one]) == ids([greedy])


def test_a_grammar_that_fails_ends_its_request_alone(asynchronous: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(generate(asynchronous, asked := mixed(seed=3)))
    accept, made = TokenMatcher.accept, iter(range(10**6))
    copy = TokenMatcher.copy
    left: dict[TokenMatcher, int] = {}  # the number of tokens that the third matcher takes

    def failing(self: TokenMatcher, token_id: int) -> str | None:
        if self in left:
            left[self] -= 1
        return "structured_outputs: too complex" if left.get(self) == 0 else accept(self, token_id)

    def counted(self: TokenMatcher) -> TokenMatcher:
        matcher = copy(self)
        if next(made) == 2:
            left[matcher] = 4
        return matcher

    monkeypatch.setattr(TokenMatcher, "accept", failing)
    monkeypatch.setattr(TokenMatcher, "copy", counted)
    found = asynchronous.generate(STORIES[: len(asked)], [params for _, params in asked], use_tqdm=False)
    [failed] = [i for i, output in enumerate(found) if output.outputs[0].finish_reason == "error"]
    assert failed == 3 and found[3].outputs[0].stop_reason == "structured_outputs: too complex"
    assert found[3].outputs[0].token_ids == expected[3][:3]
    assert ids(found)[:3] + ids(found)[4:] == expected[:3] + expected[4:]


def test_ctrl_c_while_masks_are_filled(asynchronous: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(generate(asynchronous, asked := mixed(seed=4)))
    fill, calls = TokenGrammars.fill, iter(range(10**6))

    def interrupted(self: TokenGrammars, wanted: Any, masks: Any) -> None:
        if next(calls) == 3:
            raise KeyboardInterrupt
        fill(self, wanted, masks)

    with monkeypatch.context() as patch:
        patch.setattr(TokenGrammars, "fill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            asynchronous.generate(STORIES[: len(asked)], [params for _, params in asked], use_tqdm=False)
    assert not asynchronous.engine.has_unfinished() and ids(generate(asynchronous, asked)) == expected


def test_what_is_refused_is_refused_before_anything_is_queued(llm: LLM) -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(json={"not": {}}))
    with pytest.raises(ValueError, match=r'prompts\[1\]: structured_outputs.json cannot be enforced: .*"not"'):
        llm.generate(STORIES[:2], [SamplingParams(), bad], use_tqdm=False)
    assert not llm.engine.has_unfinished()


def test_ids_alone_cannot_be_structured(model: Path) -> None:
    needs = pytest.raises(ValueError, match="structured_outputs needs a tokenizer")
    with LLM(model, skip_tokenizer_init=True, **SMALL) as llm, needs:
        llm.generate([[1, 2]], SamplingParams(structured_outputs=KINDS["choice"]), use_tqdm=False)


def test_async_llm_refuses_at_once_and_compiles_in_the_callers_thread(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: set[str] = set()
    compile = TokenGrammars.compile

    def spy(self: TokenGrammars, params: StructuredOutputsParams) -> TokenMatcher:
        names.add(threading.current_thread().name)
        return compile(self, params)

    monkeypatch.setattr(TokenGrammars, "compile", spy)

    async def main() -> list[CompletionOutput]:
        async with AsyncLLM(model, **SMALL) as llm:
            bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(?=a)b"))
            with pytest.raises(ValueError, match="look-around"):
                llm.generate(STORIES[0], bad)
            good = SamplingParams(structured_outputs=KINDS["choice"], seed=1)
            given_up = llm.generate(STORIES[1], SamplingParams(structured_outputs=KINDS["json"], seed=1))
            await anext(given_up)
            await given_up.aclose()
            return [choice async for delta in llm.generate(STORIES[0], good) for choice in delta.outputs]

    deltas = asyncio.run(main())
    assert matches("choice", "".join(delta.text for delta in deltas)) and deltas[-1].finish_reason == "stop"
    assert names == {"MainThread"}, "no step waits for a grammar"
