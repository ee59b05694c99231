"""The judge judged: it passes what is right, fails what is wrong, and names the right suspect for a planted fault."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from stages.core import SamplingParams
from stages.manifest import load_stage
from tests import oracle
from tests.oracle_explain import explain
from tests.stages.requests import random_prompts
from tests.weights import lively_qwen3

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [200, 100], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]
SMALL: dict[str, Any] = {"block_size": 4, "num_blocks": 40}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_qwen3(tmp_path_factory.mktemp("oracle"))


def planted(number: int, *faults: tuple[str, str]) -> Any:
    """The engine of a copy of stage `number` in which each text of `faults` is replaced by another."""
    stage = load_stage(number)
    original = sys.modules[stage.engine_class().__module__]
    source = Path(str(original.__file__)).read_text(encoding="utf-8")
    for right, wrong in faults:
        assert source.count(right) == 1, f"{right!r} occurs {source.count(right)} times in {original.__name__}"
        source = source.replace(right, wrong)
    copy = ModuleType(f"{original.__name__}_planted")
    sys.modules[copy.__name__] = copy  # dataclasses look their module up
    exec(compile(source, copy.__name__, "exec"), copy.__dict__)
    return getattr(copy, stage.class_name)


# --- the explainer ---------------------------------------------------------------------------------------------------

LONE_FAULTS = {  # name: suspect, stage, text in it, what it is replaced by
    "decode one position too late": ("position", 2, "[[len(seq.token_ids) - 1] for", "[[len(seq.token_ids)] for"),
    "decode one position too early": (
        "position", 3, "positions += range(start, stop)", "positions += range(start - (n == 1), stop - (n == 1))",
    ),
    "the token itself is masked": ("mask", 2, "<= positions[:, None, :, None]", "< positions[:, None, :, None]"),
    "the next token is not masked": ("mask", 3, "device) <= last_key", "device) <= last_key + 1"),
    "the first token is masked": (
        "mask", 3, "device) <= last_key",
        "device) <= last_key - longest * ((torch.arange(longest) == 0) & (last_key > 0))",
    ),
    "nothing is masked": ("mask", 1, "is_causal=True", "is_causal=False"),
    "values in the wrong slots": (
        "cache", 3, "self.v[layer].flatten(0, 1)[batch.slots]", "self.v[layer].flatten(0, 1)[batch.slots.flip(0)]",
    ),
    "keys of one block stay stale": (
        "cache", 3, "[batch.slots] = k", "[batch.slots] = k * (batch.slots // 4 != 2)[:, None, None]",
    ),
    "another token than the best": ("sampling", 1, "append_token(seq, token,", "append_token(seq, token ^ 1,"),
    "logits of the last token but one": ("sampling", 2, "[seq.num_prompt_tokens - 1", "[seq.num_prompt_tokens - 2"),
    "one token too many": (
        "sampling", 1, "self.eos_token_ids, self.trace)", "self.eos_token_ids, self.trace) and len(seq.output) > 24",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("suspect", "stage", "right", "wrong"), LONE_FAULTS.values(), ids=LONE_FAULTS)
def test_a_fault_in_a_lone_request_is_explained(path: Path, suspect: str, stage: int, right: str, wrong: str) -> None:
    engine_class = planted(stage, (right, wrong))
    options = SMALL if stage >= 3 else {}
    outputs = engine_class(path, **options).generate(PROMPTS, GREEDY)
    with pytest.raises(AssertionError, match=f"suspect: {suspect} "):
        oracle.check_greedy(path, PROMPTS, outputs, GREEDY, lambda: engine_class(path, **options))
    # The same copy without the fault is right, so it was the fault that was seen
    outputs = planted(stage)(path, **options).generate(PROMPTS, GREEDY)
    oracle.check_greedy(path, PROMPTS, outputs, GREEDY)


def test_the_first_layer_past_tolerance_is_named(path: Path) -> None:
    def make_engine() -> Any:
        engine = load_stage(2).engine_class()(path)
        engine.model.layers[0].mlp.down_proj.weight.mul_(1.5)
        return engine

    explanation = explain(make_engine, path, PROMPTS, [GREEDY] * 3, 0)
    assert (explanation.suspect, explanation.layer) == ("model", 1)
    assert explanation.mismatch is not None and explanation.mismatch.gap > 0


def test_a_leak_between_rows_is_explained(path: Path) -> None:
    rows = "rows = torch.arange(batch, device=positions.device)[:, None]"
    engine_class = planted(2, (rows, rows.replace("[:, None]", ".roll(1)[:, None]")))
    explanation = explain(lambda: engine_class(path), path, PROMPTS, [GREEDY] * 3, 2)
    assert explanation.suspect == "batch composition" and explanation.layer == 0
    assert explain(lambda: engine_class(path), path, PROMPTS[:1], [GREEDY], 0).suspect == "not reproduced"


def test_a_stale_block_of_the_prefix_cache_is_explained(path: Path) -> None:
    """CASES P2: a block that was refilled under another prefix still matches."""
    forget = "for block in fresh:\n            self.forget(block)"
    prefix = "if self.find(content.digest) is not content:"
    engine_class = planted(4, (forget, "pass"), (prefix, "if True:"))
    first, second = [1, 2, 5, 6, 1, 2, 9], [7, 7, 5, 6, 5, 6, 9, 8]
    params = SamplingParams(temperature=0, max_tokens=2)

    def make_engine() -> Any:
        return engine_class(path, block_size=2, num_blocks=5)

    assert explain(make_engine, path, [first], [params], 0, history=[[first], [second]]).suspect == "cache"
    right = planted(4)(path, block_size=2, num_blocks=5)
    for prompt in (first, second, first):
        oracle.check_greedy(path, [prompt], right.generate([prompt], params), params)


# --- the rules -------------------------------------------------------------------------------------------------------


def greedy(path: Path, prompt: list[int], length: int) -> list[int]:
    judge, tokens = oracle.truth(path), list(prompt)
    while len(tokens) < len(prompt) + length:
        tokens.append(int(judge.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_fp32_tokens_must_be_identical(path: Path) -> None:
    right = greedy(path, PROMPTS[0], 24)
    oracle.check_greedy(path, PROMPTS[:1], [right], GREEDY)
    for wrong in (right[:-1], [*right, 0], [*right[:9], right[9] ^ 1, *right[10:]], []):
        with pytest.raises(AssertionError, match="request 0"):
            oracle.check_greedy(path, PROMPTS[:1], [wrong], GREEDY)
    eos = SimpleNamespace(eos_token_ids={right[4]}, choices=oracle.truth(path).choices)
    assert oracle.find_mismatch(eos, PROMPTS[0], right[: right.index(right[4]) + 1], GREEDY) is None  # type: ignore[arg-type]
    late = oracle.find_mismatch(eos, PROMPTS[0], right, GREEDY)  # type: ignore[arg-type]
    assert late is not None and late.expected is None and late.index == right.index(right[4]) + 1


def test_numerics_n2_half_precision_tokens_are_judged_by_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bf16 token that differs is not by itself a fault: the margin and the share of such tokens decide."""
    exact = torch.zeros(300, 4)
    exact[:, 1], exact[:, 2] = 1.0, 0.98  # token 2 is a near-tie, token 0 is not
    half = exact + 0.05

    def judge(scores: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(eos_token_ids=set(), choices=lambda prompt, output: scores[: len(output)])

    judges = {torch.float32: judge(exact), torch.bfloat16: judge(half)}
    monkeypatch.setattr(oracle, "truth", lambda path, dtype, device: judges[dtype])

    def check(*outputs: list[int], length: int = 300) -> None:
        params = SamplingParams(temperature=0, max_tokens=length)
        oracle.check_greedy_half(Path(), [[1]] * len(outputs), list(outputs), params, torch.bfloat16, "cpu")

    check([1] * 300)
    check([2] * 6 + [1] * 294)
    with pytest.raises(AssertionError, match="7 of 300"):
        check([2] * 7 + [1] * 293)
    with pytest.raises(AssertionError, match="output token 1 is 0"):
        check([2, 0] + [1] * 298)
    with pytest.raises(AssertionError, match="ends wrongly"):
        check([1] * 299)
    with pytest.raises(AssertionError, match="needs 256 positions"):
        check([1] * 255, length=255)

    half[10:20, 2] += 0.04  # HF's own bf16 run prefers token 2 at ten positions: 20 may differ, wherever they are
    check([1] * 280 + [2] * 20)
    with pytest.raises(AssertionError, match=r"21 of 300 .* only 10 are not"):
        check([1] * 279 + [2] * 21)
    with pytest.raises(AssertionError, match="output token 1 is 0"):  # the margin holds as before
        check([2, 0] + [1] * 298)
    check([2] * 40 + [1] * 260, [1] * 300)  # all outputs count together
    with pytest.raises(AssertionError, match=r"41 of 600 .* only 20 are not"):
        check([2] * 40 + [1] * 260, [2] + [1] * 299)


def test_numerics_n2_a_second_best_token_too_often_is_caught(path: Path) -> None:
    """A bf16 engine that takes the second of two close tokens stays within the margin, and fails by the share."""
    prompts, params = random_prompts(*range(3, 19)), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    second = "[int(row.topk(2).indices[int(row.topk(2).values.diff().abs() < 0.1)]) for row in logits]"

    def check(*faults: tuple[str, str]) -> None:
        outputs = planted(2, *faults)(path, dtype=torch.bfloat16).generate(prompts, params)
        oracle.check_greedy_half(path, prompts, outputs, params, torch.bfloat16, "cpu")

    check()
    with pytest.raises(AssertionError, match="tokens are not HF's fp32 choice"):
        check(("sample(logits, batch)", second))


def test_the_rms_rule_compares_with_hf_in_the_same_precision(path: Path) -> None:
    tokens = [(i * i + 7 * i) % 500 for i in range(512)]
    exact = oracle.truth(path).logits(tokens)
    theirs = oracle.truth(path, torch.bfloat16).logits(tokens)
    oracle.check_rms(theirs, path, tokens, torch.bfloat16, "cpu")
    oracle.check_rms(exact + 1.4 * (theirs - exact), path, tokens, torch.bfloat16, "cpu")
    with pytest.raises(AssertionError, match=r"1\.60 times"):
        oracle.check_rms(exact + 1.6 * (theirs - exact), path, tokens, torch.bfloat16, "cpu")
    with pytest.raises(AssertionError, match="512 positions"):
        oracle.check_rms(theirs[:511], path, tokens[:511], torch.bfloat16, "cpu")


def test_the_logits_rule(path: Path) -> None:
    expected = oracle.truth(path).logits(PROMPTS[0])
    limit = 1e-4 * expected.abs().max()
    oracle.check_logits(expected + 0.9 * limit, expected)
    worse = expected.clone()
    worse[3, 7] += 1.1 * limit
    for wrong in (worse, expected.masked_fill(expected == expected.max(), float("nan")), expected[1:]):
        with pytest.raises(AssertionError, match="logits"):
            oracle.check_logits(wrong, expected)


def test_chi_square() -> None:
    odds = torch.tensor([0.4, 0.3, 0.2, 0.0999, 0.0001])
    draws = torch.multinomial(odds, 2000, replacement=True, generator=torch.Generator().manual_seed(0)).tolist()
    oracle.check_distribution(draws, odds)
    for wrong in ([0.34, 0.36, 0.2, 0.0999, 0.0001], [0.45, 0.3, 0.2, 0.03, 0.02]):
        with pytest.raises(AssertionError, match="chi-square"):
            oracle.check_distribution(draws, torch.tensor(wrong))


def test_a_dull_output_is_refused(path: Path) -> None:
    oracle.check_lively(greedy(path, PROMPTS[0], 64))
    for dull in ([7] * 64, list(range(19)) * 4, list(range(40))):
        with pytest.raises(AssertionError, match="distinct"):
            oracle.check_lively(dull)
