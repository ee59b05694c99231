"""logit_bias, bad_words, allowed_token_ids, min_tokens and penalties in the engine: each token is what the parameters'
texts say of its logits, whatever steps it was computed in; and what is refused."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.sampling_params import MAX_BAD_TOKENS, MAX_BAD_WORDS
from nanovllm.text.bad_words import with_spellings
from nanovllm.text.tokenizer import Tokenizer
from tests.engine.test_token_texts import made
from tests.kernels.sampling import literal_edits
from tests.weights import VOCAB, lively_qwen3

STORY_MODEL = Path(__file__).parents[2] / "assets" / "story_model"
PROMPTS = [[(37 * i + j) % 500 for j in range(3 * i + 1)] for i in range(5)]
TOKENS = 12
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "kvcache_block_size": 4, "num_kv_blocks": 120}
TIGHT = {"num_kv_blocks": 16, "max_num_batched_tokens": 7, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_qwen3(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[LLM]:
    with LLM(path, **OPTIONS, async_scheduling=False) as llm:
        yield llm


def generate(llm: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(PROMPTS, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


@pytest.fixture(scope="module")
def edited(plain: LLM) -> list[SamplingParams]:
    """Of each kind what changes these outputs: bad words that the request would write otherwise, again and again."""
    P = partial(SamplingParams, temperature=0, max_tokens=TOKENS, ignore_eos=True)
    params = [
        P(),
        P(logit_bias=dict.fromkeys(range(0, VOCAB, 9), 4.0), frequency_penalty=1.5, presence_penalty=0.5),
        P(allowed_token_ids=range(0, VOCAB, 2), stop_token_ids=range(0, 120, 2), min_tokens=9),
        P(temperature=1.5, seed=3, n=2, top_k=30, logit_bias=dict.fromkeys(range(50), -100.0), presence_penalty=2.0),
        P(repetition_penalty=1.4, allowed_token_ids=range(100, VOCAB), logit_bias=dict.fromkeys(range(90, 130), 2.5)),
    ]
    for length in (2, 3, 1):
        outputs = tokens(generate(plain, [p.changed(n=1) for p in params]))
        for i, output in enumerate(outputs):
            words = tuple(tuple(output[at - length : at]) for at in (length, length + 3) if at <= len(output))
            params[i] = params[i].changed(bad_words_ids=params[i].bad_words_ids + words)
    return params


@pytest.fixture(scope="module")
def expected(plain: LLM, edited: list[SamplingParams]) -> list[list[int]]:
    return tokens(generate(plain, edited))


def test_each_token_is_the_best_of_its_edited_logits(plain: LLM, edited: list[SamplingParams]) -> None:
    """Seen from log-probabilities of the whole vocabulary, which no edit changes."""
    greedy = [p.changed(temperature=0.0, n=1, logprobs=VOCAB, repetition_penalty=1.0) for p in edited]
    ruled_out = 0
    for prompt, p, output in zip(PROMPTS, greedy, generate(plain, greedy), strict=True):
        choice = output.outputs[0]
        assert choice.logprobs is not None and len(choice.token_ids) >= 9
        for i, (token, found) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
            logprobs = torch.tensor([found[id].logprob for id in range(VOCAB)])
            assert logprobs.exp().sum().item() == pytest.approx(1, abs=1e-3)
            scores = literal_edits(logprobs, p, prompt, choice.token_ids[:i], list(p.stop_token_ids))
            assert max(scores) - scores[token] < 1e-4
            ruled_out += scores[int(logprobs.argmax())] == float("-inf")
    assert ruled_out >= 10


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"async_scheduling": True}, marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 3, "enable_prefix_caching": False}, marks=pytest.mark.slow),
        TIGHT | {"async_scheduling": True},
        {"speculative": {"method": "ngram", "k": 4, "n": 1}},
        pytest.param({"tensor_parallel_size": 2, "async_scheduling": True}, marks=pytest.mark.slow),
        pytest.param(TIGHT | {"speculative": {"method": "ngram", "k": 4, "n": 1}}, marks=pytest.mark.slow),
    ],
    ids=["async", "chunks", "preempted", "guesses", "ranks", "guesses and preempted"],
)
def test_how_a_token_is_computed_changes_nothing(
    path: Path, edited: list[SamplingParams], expected: list[list[int]], config: dict[str, Any]
) -> None:
    with LLM(path, **OPTIONS | config) as llm:
        found = generate(llm, edited)
    assert tokens(found) == expected
    assert ("num_kv_blocks" in config) == any(output.metrics.num_preemptions for output in found)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, TIGHT], ids=["roomy", "preempted"])
def test_a_draft_is_edited_as_its_target_is(
    path: Path, edited: list[SamplingParams], expected: list[list[int]], config: dict[str, Any]
) -> None:
    """So one that is equal to the target is always right; and greedy tokens are those without guesses."""
    with LLM(path, **OPTIONS | config, speculative={"model": path, "k": 3}) as llm:
        found = tokens(generate(llm, edited))
        stats = llm.engine.scheduler.speculation
    assert stats.accepted == stats.proposed and stats.num_steps
    assert found[:3] + found[5:] == expected[:3] + expected[5:]


@pytest.mark.slow
def test_plain_requests_beside_edited_ones_get_their_tokens(plain: LLM, edited: list[SamplingParams]) -> None:
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=TOKENS, ignore_eos=True) for i in range(5)]
    alone, together = tokens(generate(plain, params)), generate(plain, [params[0], *edited[1:3], *params[3:]])
    assert [together[i].outputs[0].token_ids for i in (0, 3, 4)] == [alone[i] for i in (0, 3, 4)]


@pytest.mark.slow
def test_tokens_are_those_of_hugging_face(path: Path, plain: LLM) -> None:
    """Whose processors of the same meaning are written independently. Bad words there may begin in the prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompt, eos = [500, 501, 502], 511
    free = plain.generate([prompt], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
    [output] = tokens(free)
    words = [output[3:5], output[7:10], [output[0]]]
    bias = {output[1]: -5.0, 17: 3.0, 400: 2.0}
    p = SamplingParams(
        temperature=0, max_tokens=30, repetition_penalty=1.3, logit_bias=bias, min_tokens=30, stop_token_ids=[eos]
    )
    ours = plain.generate([prompt], p.changed(bad_words_ids=tuple(map(tuple, words))), use_tqdm=False)
    theirs = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 3), do_sample=False, max_new_tokens=30, min_new_tokens=30,
        eos_token_id=[eos, *plain.engine.eos_token_ids], pad_token_id=0, repetition_penalty=1.3, bad_words_ids=words,
        sequence_bias=[[[token], value] for token, value in bias.items()],
    )  # fmt: skip
    assert tokens(ours) == [theirs[0, 3:].tolist()] and tokens(ours) != tokens(free)


# --- texts -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def story() -> Iterator[LLM]:
    with LLM(STORY_MODEL, max_model_len=128, num_kv_blocks=64, kvcache_block_size=16) as llm:
        yield llm


def test_bad_words_do_not_appear_in_the_text(story: LLM) -> None:
    prompt = "Once upon a time, in the"
    cases: list[list[str]] = [[], ["sleepy"], [" village"], ["sleepy", "village of"], ["sleepy village"], ["dragon"]]
    params = [SamplingParams(temperature=0, max_tokens=6, bad_words=words) for words in cases]
    outputs = story.generate([prompt, *[prompt] * 5, prompt + " "], [*params, params[1]], use_tqdm=False)
    usual, *others, same, behind_a_space = (output.outputs[0].text for output in outputs)
    assert usual == same and usual.startswith(" sleepy village of")
    for words, found in zip(cases[1:], others, strict=False):
        assert found != usual and not any(word in found for word in words)
    assert not behind_a_space.startswith("sleepy")


class Fast(Tokenizer):
    """A tokenizer without files."""

    def __init__(self, fast: FastTokenizer) -> None:
        self.fast = fast


@pytest.mark.parametrize(
    ("kind", "spellings"),
    [
        ("byte-level", [["hello"], ["Ġhello"]]),
        ("Llama 2", [["▁", "h", "e", "l", "l", "o"], ["▁", "▁", "h", "e", "l", "l", "o"]]),
        ("Unigram", [["▁hello"]]),
    ],
)
def test_both_spellings_of_the_space(kind: str, spellings: list[list[str]]) -> None:
    tokenizer = Fast(made(kind))
    for word in ("hello", " hello"):
        found = with_spellings(SamplingParams(bad_words=[word, word]), tokenizer).bad_words_ids
        names = [[tokenizer.fast.id_to_token(id) for id in ids] for ids in found]
        if kind == "byte-level":  # whose merges follow from its corpus
            assert ["".join(name) for name in names] == ["".join(name) for name in spellings]
        else:
            assert names == spellings


def test_special_tokens_around_a_text_are_no_part_of_a_bad_word(story: LLM) -> None:
    assert story.tokenizer is not None
    found = story.prepare(SamplingParams(bad_words=["<|endoftext|>", "\n", "Pip"])).bad_words_ids
    assert [story.tokenizer.decode(ids, skip_special_tokens=False) for ids in found][-3:] == ["\n", "Pip", " Pip"]
    assert story.prepare(SamplingParams()) == SamplingParams()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"logit_bias": {4096: 1}}, "logit_bias contains 4096, which is outside the vocabulary"),
        ({"allowed_token_ids": [1, 10**20]}, "allowed_token_ids contains 100000000000000000000, which is outside"),
        ({"bad_words": ["a\ud800"]}, "bad_words has half a surrogate pair"),
        ({"bad_words": [f"w{i}" for i in range(MAX_BAD_WORDS)]}, "bad_words has 1024 spellings, .* leave some out"),
        ({"bad_words": ["xq " * MAX_BAD_TOKENS]}, f"bad_words has .* tokens together; .* {MAX_BAD_TOKENS}"),
        ({"allowed_token_ids": [0], "min_tokens": 2, "stop_token_ids": [0]}, "allowed_token_ids: .* rule out all 1"),
        ({"allowed_token_ids": [65, 259], "bad_words": ["a"]}, "allowed_token_ids: .* rule out all 2"),
    ],
)
def test_requests_that_make_no_sense_are_refused_before_anything_runs(
    story: LLM, wrong: dict[str, Any], message: str
) -> None:
    params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, **wrong)]
    with pytest.raises(ValueError, match=r"prompts\[1\]: " + message):
        story.generate(["a", "b"], params, use_tqdm=False)
    assert not story.engine.has_unfinished()


def test_bad_words_need_a_tokenizer(plain: LLM) -> None:
    params = SamplingParams(bad_words=["a"])
    with pytest.raises(ValueError, match=r"bad_words=\('a',\) needs a tokenizer"):
        plain.generate([[1]], params, use_tqdm=False)
    with pytest.raises(ValueError, match=r"bad_words=\('a',\) has no token ids"):
        plain.engine.add_request("0", [1], params)
    assert not plain.engine.has_unfinished()


def test_a_request_for_which_nothing_is_left_fails_alone(plain: LLM) -> None:
    p = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    stuck = p.changed(allowed_token_ids=(7,), bad_words_ids=((7, 7, 7),))
    alone = plain.generate([[1, 2]], p, use_tqdm=False)
    found = plain.generate([[1, 2], [3]], [p, stuck], use_tqdm=False)
    assert tokens(found) == [*tokens(alone), [7, 7]] and found[1].outputs[0].finish_reason == "error"
