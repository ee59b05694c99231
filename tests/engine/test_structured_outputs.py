"""Structured outputs of real models: every output matches, unless `max_tokens` cuts it, however the engine runs; and
whoever asks for nothing gets the tokens that they get without such neighbours."""

import asyncio
import json
import re
import shutil
import threading
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, AsyncLLM, CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams
from nanovllm.kernels import FusedKernels
from nanovllm.runner import model_runner
from nanovllm.sampling import sampler
from nanovllm.text.grammars import TokenGrammars, TokenMatcher
from tests.weights import lively_qwen3

ROOT = Path(__file__).parents[2]
STORY_MODEL = ROOT / "assets" / "story_model"
FILE = ROOT / "tests" / "data" / "story_prompts.json"
STORIES = [prompt[:50] for prompt in json.loads(FILE.read_text(encoding="utf-8"))["prompts"]]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Tom", "Anna", "Zoë"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"[A-Z][a-z]{2,6} went to the (park|sea)\."
CHOICE = ["Tom", "Tommy", "the dog", "a\nb"]
GRAMMAR = 'root ::= "(" root ")" | "[" root "]" | "x"'
KINDS: dict[str, StructuredOutputsParams] = {
    "json": StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
    "json with whitespace": StructuredOutputsParams(json=PERSON, whitespace_pattern="[ \n]"),
    "regex": StructuredOutputsParams(regex=REGEX),
    "choice": StructuredOutputsParams(choice=CHOICE),
    "grammar": StructuredOutputsParams(grammar=GRAMMAR),
}
SMALL: dict[str, Any] = {"kvcache_block_size": 4, "num_kv_blocks": 900, "max_model_len": 160, "async_scheduling": False}
TIGHT = SMALL | {"num_kv_blocks": 40, "max_num_seqs": 6, "max_num_batched_tokens": 24}
DRAFT = {"model": ROOT / "assets" / "story_draft", "k": 4}
NGRAM = {"method": "ngram", "k": 4, "n": 1}


def matches(kind: str, text: str) -> bool:
    if kind.startswith("json"):
        person = json.loads(text)
        tags = person["tags"]
        return (
            list(person) == ["name", "age", "tags"]
            and person["name"] in ("Tom", "Anna", "Zoë")
            and type(person["age"]) is int
            and 1 <= person["age"] <= 99
            and len(tags) <= 2
            and all(isinstance(tag, str) and len(tag) <= 8 for tag in tags)
        )
    if kind == "grammar":
        while text != "x":
            if (text[:1], text[-1:]) not in {("(", ")"), ("[", "]")}:
                return False
            text = text[1:-1]
        return True
    return text in CHOICE if kind == "choice" else re.fullmatch(REGEX, text) is not None


def check(kind: str, output: RequestOutput, eos: Container[int] = (0,)) -> None:
    """Each choice is whole, and ended by EOS; or it is the beginning of something that `max_tokens` cut."""
    for choice in output.outputs:
        if choice.finish_reason == "stop":
            assert matches(kind, choice.text), (kind, choice.text)
            assert choice.token_ids[-1] in eos and choice.stop_reason is None
        else:
            assert choice.finish_reason == "length" and choice.token_ids[-1] not in eos, (kind, choice)


def mixed(seed: int, temperature: float = 1.0, **more: Any) -> list[tuple[str | None, SamplingParams]]:
    """Two plain requests among one of each kind."""
    params: dict[str, Any] = {"temperature": temperature, "max_tokens": 60, **more}
    asked: list[tuple[str | None, SamplingParams]] = [
        (kind, SamplingParams(structured_outputs=structure, seed=seed + i, **params))
        for i, (kind, structure) in enumerate(KINDS.items())
    ]
    plain = SamplingParams(temperature=temperature, seed=seed, max_tokens=12)
    filtered = SamplingParams(temperature=temperature, seed=seed, max_tokens=12, top_k=9, presence_penalty=0.5)
    return [(None, plain), *asked, (None, filtered)]


def generate(llm: LLM, asked: list[tuple[str | None, SamplingParams]]) -> list[RequestOutput]:
    found = llm.generate(STORIES[: len(asked)], [params for _, params in asked], use_tqdm=False)
    for (kind, _), output in zip(asked, found, strict=True):
        if kind is not None:
            check(kind, output)
    assert llm.engine.scheduler.blocks.num_free == llm.engine.scheduler.num_kv_blocks
    assert llm.engine.scheduler.num_matchers == 0
    return found


def ids(found: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in found for choice in output.outputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, for which every text is as good as another, and more ids than the tokenizer has."""
    path = lively_qwen3(tmp_path_factory.mktemp("lively"), num_hidden_layers=1, vocab_size=4200, eos_token_ids=[0])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STORY_MODEL / name, path / name)
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def asynchronous(model: Path) -> Iterator[LLM]:
    with LLM(model, **SMALL | {"async_scheduling": True}) as llm:
        yield llm


@pytest.fixture(scope="module")
def story() -> Iterator[LLM]:
    with LLM(STORY_MODEL, **SMALL) as llm:
        yield llm


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

    def interrupted(self: TokenGrammars, wanted: Any) -> bytearray:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return fill(self, wanted)

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


# --- the slow tier: many seeds, every way to run ---------------------------------------------------------------------


@pytest.mark.slow
def test_the_kernels_of_a_gpu_honour_the_masks(llm: LLM, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter. With guesses, whose masks are not of rows, PyTorch draws."""
    pytest.importorskip("triton")
    from nanovllm.kernels.fused.edits import edit_logits, restore_logits
    from nanovllm.kernels.fused.sample import sample_rows

    drawn = []

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        drawn.append(options)
        return sample_rows(*args, **options)

    fused = FusedKernels(sample_rows=counted, edit_logits=edit_logits, restore_logits=restore_logits)
    asked = [one for one in mixed(seed=6, max_tokens=3) if one[0] == "regex"]
    asked.append((None, SamplingParams(seed=6, max_tokens=3)))
    words = [*range(30, 60), 0]
    both = StructuredOutputsParams(regex="[A-Za-z]{3}")
    asked.append((None, SamplingParams(structured_outputs=both, allowed_token_ids=words, seed=1, logprobs=0)))
    expected = ids(generate(llm, asked))
    assert set(expected[-1]) <= set(words)
    for module in (sampler, model_runner):
        monkeypatch.setattr(module, "fused_kernels", lambda device: fused)
    with LLM(model, **SMALL) as other:
        assert other.engine.executor.runner.state.in_kernels
        assert ids(generate(other, asked)) == expected and drawn
    with LLM(model, **SMALL, speculative=NGRAM) as guessing:
        assert ids(generate(guessing, asked)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7, 5.0])
def test_outputs_match_whatever_the_temperature(llm: LLM, asynchronous: LLM, story: LLM, temperature: float) -> None:
    for seed in (100, 200):
        found = generate(llm, asked := mixed(seed, temperature, n=12))
        assert ids(generate(asynchronous, asked)) == ids(found)
    generate(story, mixed(300, temperature, n=6))


WAYS: dict[str, dict[str, Any]] = {
    "preempted": TIGHT,
    "preempted, asynchronous": TIGHT | {"async_scheduling": True},
    "tiny chunks, asynchronous": SMALL | {"max_num_batched_tokens": 9, "max_num_seqs": 8, "async_scheduling": True},
    "no prefix cache": SMALL | {"enable_prefix_caching": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_tokens_do_not_depend_on_how_the_engine_runs(llm: LLM, model: Path, way: str) -> None:
    with LLM(model, **WAYS[way]) as other:
        for seed in range(2):
            asked = mixed(seed, n=3)
            found = generate(other, asked)
            assert ids(found) == ids(generate(llm, asked))
            if "preempted" in way:
                assert sum(output.metrics.num_preemptions for output in found) > 0
            again = generate(other, asked)
            assert ids(again) == ids(found)
            cached = sum(output.num_cached_tokens for output in again)
            assert cached > 0 or way == "no prefix cache" or "preempted" in way


@pytest.mark.slow
@pytest.mark.parametrize("config", [SMALL, TIGHT], ids=["roomy", "tight"])
def test_ngram_guesses_change_no_structured_token(llm: LLM, model: Path, config: dict[str, Any]) -> None:
    with LLM(model, **config, speculative=NGRAM) as other:
        for seed in range(3):
            asked = mixed(seed, temperature=0.8, n=3)
            assert ids(generate(other, asked)) == ids(generate(llm, asked))
        assert sum(other.engine.scheduler.speculation.accepted) > 0


@pytest.mark.slow
def test_a_drafts_guesses_match_too(story: LLM) -> None:
    with (
        LLM(STORY_MODEL, **SMALL, speculative=DRAFT) as roomy,
        LLM(STORY_MODEL, **TIGHT, speculative=DRAFT | {"k": 2}) as tight,
    ):
        asked = mixed(0, temperature=0.8)
        assert ids(generate(roomy, asked)) == ids(generate(tight, asked)), "k and preemptions do not matter"
        greedy = mixed(0, temperature=0.0)
        assert ids(generate(roomy, greedy)) == ids(generate(story, greedy))
        assert sum(roomy.engine.scheduler.speculation.accepted) > 0


@pytest.mark.slow
def test_a_drafts_guesses_leave_the_distribution_alone(story: LLM) -> None:
    """Which of six words: by chi-square against the target without guesses, whose seeds mean other noise."""
    words = StructuredOutputsParams(regex="(Tom|Anna|Zoe)(ab|cd)")
    params = SamplingParams(structured_outputs=words, seed=1, temperature=3.0, n=240)
    counts = []
    with LLM(STORY_MODEL, **SMALL, speculative=DRAFT) as guessing:
        for engine in (story, guessing):
            [output] = engine.generate(STORIES[0], params, use_tqdm=False)
            counts.append(Counter(choice.text for choice in output.outputs))
    one, other = counts
    statistic = sum((one[text] - other[text]) ** 2 / (one[text] + other[text]) for text in one | other)
    assert len(one) >= 4 and statistic < 25, counts  # with 5 degrees of freedom, 0.01% lie beyond


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_two_ranks_give_the_same_tokens(llm: LLM, model: Path, overlap: bool) -> None:
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "device": "cpu", "dtype": "float32"}
    with LLM(model, **SMALL | {"async_scheduling": overlap}, **ranks) as two:
        for seed in range(2):
            asked = mixed(seed, n=2)
            expected = ids(generate(llm, asked))
            assert ids(generate(two, asked)) == expected
        # Given up between the model and its tokens, on every rank
        assert two.engine.grammars is not None
        two.engine.add_request("a", [1, 2, 3], asked[1][1])
        fill = two.engine.grammars.fill
        two.engine.grammars.fill = None
        with pytest.raises(TypeError):
            two.engine.step()
        two.engine.abort_all()
        two.engine.grammars.fill = fill
        assert ids(generate(two, asked)) == expected


@pytest.mark.slow
def test_a_draft_on_two_ranks() -> None:
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "device": "cpu", "dtype": "float32"}
    with (
        LLM(STORY_MODEL, **SMALL, speculative=DRAFT) as one,
        LLM(STORY_MODEL, **SMALL, **ranks, speculative=DRAFT) as two,
    ):
        asked = mixed(5, max_tokens=25)
        assert ids(generate(two, asked)) == ids(generate(one, asked))


@pytest.mark.slow
def test_aborts_in_the_middle(llm: LLM, asynchronous: LLM) -> None:
    kinds = [*KINDS]
    for engine in (llm.engine, asynchronous.engine):
        for steps in range(1, 5):
            for i, (_, params) in enumerate(mixed(seed=steps)):
                engine.add_request(str(i), llm.encode({"prompt": STORIES[i]}), params)
            for _ in range(steps):
                engine.step()
            for i in (1, 4, 0):
                engine.abort_request(str(i))
            while engine.has_unfinished():
                for output in engine.step():
                    if output.finished and output.request_id in "235":
                        check(kinds[int(output.request_id) - 1], output)
            assert engine.scheduler.num_matchers == 0


@pytest.mark.slow
def test_an_instruction_model_answers_in_json(smollm2: Path) -> None:
    question = [{"role": "user", "content": "Invent a person. Answer in JSON with name, age and tags."}]
    asked = [
        SamplingParams(temperature=temperature, seed=1, max_tokens=80, structured_outputs=structure)
        for temperature in (0.0, 0.7, 1.5)
        for structure in KINDS.values()
    ]
    with LLM(smollm2, max_model_len=200, num_kv_blocks=200, async_scheduling=True) as llm:
        found = llm.chat([question] * len(asked), asked, use_tqdm=False)
    for kind, output in zip([*KINDS] * 3, found, strict=True):
        check(kind, output, llm.engine.eos_token_ids)
    assert sum(output.outputs[0].finish_reason == "stop" for output in found) >= 12
