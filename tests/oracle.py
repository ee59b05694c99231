"""The only judge of right answers, for stages and engine alike: Hugging Face, and rules with explicit numbers.

    logits, fp32     within 1e-4 x max(1, max |logit|) of HF's
    tokens, fp32     greedy: each is HF's argmax given the tokens before it: the sequences are identical
    tokens, half     greedy: each is HF's fp32 argmax given the same prefix, or lies below the top logit by no more than
                     HF's own error in that precision can explain: twice the largest at that position, since both
                     logits may err; at most 2% of positions may need that, or twice as many as HF's own choices in
                     that precision need
    logits, half     RMS error against HF's fp32 over at least 512 positions at most 1.5 times that of HF's own
    sampled tokens   chi-square against HF's probabilities

HF is asked by teacher forcing: one forward over prompt + output gives its choice at every position, without a
generation loop and without touching the logits (HF's `min_new_tokens`, for one, suppresses EOS by changing them).
When greedy tokens are wrong, `tests/oracle_explain.py` runs the request again and says what to suspect.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

LOGITS_TOLERANCE = 1e-4
NEAR_TIES = 0.02
NEAR_TIES_RATIO = 2
NEAR_TIES_POSITIONS = 256
RMS_RATIO = 1.5
RMS_POSITIONS = 512
P_VALUE = 1e-4
LIVELY = 20


class Params(Protocol):
    """What the oracle reads of sampling parameters, whoever's they are."""

    @property
    def temperature(self) -> float: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def ignore_eos(self) -> bool: ...


class Generates(Protocol):
    """What the oracle needs of an engine; `model` is called as model(input_ids, positions, attend), .logits(hidden)."""

    model: Any

    def generate(self, prompts: list[list[int]], params: Any) -> list[list[int]]: ...


MakeEngine = Callable[[], Generates]


class Truth:
    """Hugging Face's model of one checkpoint in one dtype. Get it from `truth`, which loads each only once."""

    def __init__(self, path: Path, dtype: torch.dtype, device: str) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
        self.model = model.to(device).eval()
        self.device = device
        eos = GenerationConfig.from_pretrained(path).eos_token_id
        self.eos_token_ids = {eos} if isinstance(eos, int) else set(eos or ())
        if (path / "tokenizer.json").exists():
            eos = AutoTokenizer.from_pretrained(path).eos_token_id
            self.eos_token_ids |= {eos} - {None}
        self._logits = lru_cache(maxsize=64)(self._forward)

    @torch.inference_mode()
    def _forward(self, tokens: tuple[int, ...]) -> Tensor:
        return self.model(torch.tensor([tokens], device=self.device)).logits[0].float().cpu()  # [T, V]

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Scores of the token after each of `tokens` -> float32 [T, V] on the CPU."""
        return self._logits(tuple(tokens))

    def choices(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """The scores from which each token of `output` was to be chosen, given all before it -> [len(output), V]."""
        if not output:
            return self.logits(prompt)[:0]
        return self.logits([*prompt, *output[:-1]])[len(prompt) - 1 :]

    def probabilities(self, prompt: Sequence[int], temperature: float) -> Tensor:
        """The distribution of the token after `prompt` -> float64 [V]."""
        return (self.logits(prompt)[-1].double() / temperature).softmax(-1)

    @torch.inference_mode()
    def attention_outputs(self, tokens: Sequence[int]) -> Tensor:
        """What attention gives in each layer, before the output projection -> float32 [layers, T, Hq * D]."""
        seen: list[Tensor] = []
        hooks = [
            layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0][0].float().cpu()))
            for layer in self.model.model.layers
        ]
        try:
            self.model(torch.tensor([tokens], device=self.device))
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack(seen)


@cache
def truth(path: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Truth:
    """HF's model of the checkpoint at `path`; fp32 on the CPU is the truth, all else is what HF makes of it."""
    return Truth(path, dtype, device)


# --- logits ----------------------------------------------------------------------------------------------------------


def tolerance(expected: Tensor) -> float:
    return LOGITS_TOLERANCE * max(1.0, expected.abs().max().item())


def check_logits(ours: Tensor, expected: Tensor) -> None:
    """fp32 scores [N, V] against HF's, by the rule for fp32."""
    assert ours.shape == expected.shape, f"logits are {tuple(ours.shape)}, HF's are {tuple(expected.shape)}"
    error = (ours - expected).abs().amax(-1)  # [N]
    limit = tolerance(expected)
    worst = int(error.nan_to_num(float("inf")).argmax())
    assert bool((error <= limit).all()), (
        f"logits differ from HF's by {error[worst]:.2e} in row {worst} of {len(error)}, allowed {limit:.2e}; "
        f"rows past tolerance: {(~(error <= limit)).nonzero().flatten().tolist()[:20]}"
    )


def rms(error: Tensor) -> float:
    return error.double().square().mean().sqrt().item()


def check_rms(ours: Tensor, path: Path, tokens: Sequence[int], dtype: torch.dtype, device: str) -> None:
    """Half-precision scores [T, V] of `tokens`: RMS error at most 1.5 times HF's own, over at least 512 positions."""
    assert len(tokens) >= RMS_POSITIONS, f"the RMS rule needs {RMS_POSITIONS} positions, got {len(tokens)}"
    exact = truth(path, torch.float32, device).logits(tokens)
    theirs = rms(truth(path, dtype, device).logits(tokens) - exact)
    mine = rms(ours - exact)
    assert mine <= RMS_RATIO * theirs, f"RMS error {mine:.3e} is {mine / theirs:.2f} times HF's own {theirs:.3e}"


# --- greedy tokens ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mismatch:
    """The first token that is not HF's. Where the output had to end, `expected` is None; where it did, `chosen` is."""

    index: int
    expected: int | None
    chosen: int | None
    gap: float  # between HF's two best logits there: tiny means a near-tie

    def __str__(self) -> str:
        names = ["the end of the output" if t is None else f"token {t}" for t in (self.chosen, self.expected)]
        gap = f"its top two logits are {self.gap:.2e} apart"
        return f"output token {self.index} is {names[0]}, HF has {names[1]} ({gap})"


def end_of(output: Sequence[int], eos_token_ids: set[int], params: Params) -> int | None:
    """The length at which `output` had to end, or None if it is still to go on."""
    if not params.ignore_eos:
        for i, token in enumerate(output[: params.max_tokens]):
            if token in eos_token_ids:
                return i + 1
    return params.max_tokens if len(output) >= params.max_tokens else None


def find_mismatch(judge: Truth, prompt: Sequence[int], output: Sequence[int], params: Params) -> Mismatch | None:
    """Where `output` first differs from HF's greedy continuation of `prompt`, its end included."""
    end = end_of(output, judge.eos_token_ids, params)
    scores = judge.choices(prompt, [*output, 0])  # one more than there are: what would have come next
    best = scores.argmax(-1).tolist()
    gaps = (scores.topk(2).values @ torch.tensor([1.0, -1.0])).tolist()
    for i, token in enumerate(output):
        if i == end:
            return Mismatch(i, None, token, gaps[i])
        if token != best[i]:
            return Mismatch(i, best[i], token, gaps[i])
    return Mismatch(len(output), best[-1], None, gaps[-1]) if end is None else None


def check_greedy(
    path: Path,
    prompts: list[list[int]],
    outputs: list[list[int]],
    params: Params | Sequence[Any],
    make_engine: MakeEngine | None = None,
    history: Sequence[list[list[int]]] = (),
) -> None:
    """fp32: every output is exactly HF's, EOS and length included.

    With `make_engine`, which must give a fresh engine like the one that was used, a failure is explained. `history`:
    the prompts of the earlier calls of `generate` on the engine in question.
    """
    all_params = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    assert len(outputs) == len(prompts), f"{len(outputs)} outputs for {len(prompts)} prompts"
    judge = truth(path)
    for i, (prompt, output, p) in enumerate(zip(prompts, outputs, all_params, strict=True)):
        mismatch = find_mismatch(judge, prompt, output, p)
        if mismatch is not None:
            from tests.oracle_explain import explain

            told = f"request {i} of {len(prompts)}: {mismatch}"
            if make_engine is not None:
                told += f"\n{explain(make_engine, path, prompts, all_params, i, history=history)}"
            raise AssertionError(told)


def check_greedy_half(
    path: Path, prompts: list[list[int]], outputs: list[list[int]], params: Params, dtype: torch.dtype, device: str
) -> None:
    """bf16 and fp16: a token that is not HF's is no fault by itself; its margin and the share of such tokens decide.

    The margin: two logits decide, and HF's own half-precision run gets either of them wrong by up to `own_error`. So
    two tokens may change places when they are up to twice that apart: with errors of that size HF itself might have
    swapped them. The error is the largest of the whole vocabulary, so the second best token is often as close as that.

    The share: how many positions have two tokens that close depends on the model. Random weights in many layers make
    many, and there HF's own half-precision choices differ from its fp32 ones as well. So 2% of positions may differ, or
    twice as many as HF's own choices do on the same prefixes. A share needs many positions: at least 256 in one call.
    """
    exact, half = truth(path, torch.float32, device), truth(path, dtype, device)
    ties, own_ties, positions = 0, 0, 0
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert end_of(output, exact.eos_token_ids, params) == len(output), f"request {i} ends wrongly: {output}"
        scores = exact.choices(prompt, output)
        own_scores = half.choices(prompt, output)
        own_error = (own_scores - scores).abs().amax(-1)  # [len(output)]
        short = below_best(scores, torch.tensor(output))
        beyond = (short > 2 * own_error).nonzero().flatten().tolist()
        assert not beyond, (
            f"request {i}: output token {beyond[0]} is {output[beyond[0]]}, {short[beyond[0]]:.3f} below HF's best "
            f"logit, and HF's own {dtype} error there is only {own_error[beyond[0]]:.3f}"
        )
        ties += int((short > 0).sum())
        own_ties += int((below_best(scores, own_scores.argmax(-1)) > 0).sum())
        positions += len(output)
    assert positions >= NEAR_TIES_POSITIONS, f"a share needs {NEAR_TIES_POSITIONS} positions, got {positions}"
    assert ties <= max(NEAR_TIES * positions, NEAR_TIES_RATIO * own_ties), (
        f"{ties} of {positions} tokens are not HF's fp32 choice, and of HF's own in {dtype} only {own_ties} are not"
    )


def below_best(scores: Tensor, tokens: Tensor) -> Tensor:
    """How far the score of each of `tokens` [N] lies below the best of its row of `scores` [N, V] -> [N]."""
    return scores.amax(-1) - scores.gather(-1, tokens[:, None])[:, 0]


def check_lively(output: Sequence[int]) -> None:
    """Equal to HF proves nothing for a model that repeats itself: 20 distinct tokens in 64 are wanted."""
    distinct = len(set(output[:64]))
    assert len(output) >= 64 and distinct >= LIVELY, f"{distinct} distinct tokens in {len(output)}: {output[:64]}"


# --- sampled tokens --------------------------------------------------------------------------------------------------


def check_distribution(draws: Sequence[int], probabilities: Tensor) -> None:
    """Pearson's chi-square of how often each outcome was drawn against `probabilities` [K].

    Outcomes expected fewer than 5 times are counted as one. Seeds are fixed, so a p-value below 1e-4 is a fault.
    """
    counts = torch.bincount(torch.tensor(draws), minlength=len(probabilities)).double()
    expected = probabilities.double() * len(draws)
    common = expected >= 5
    counts = torch.cat((counts[common], counts[~common].sum()[None]))
    expected = torch.cat((expected[common], expected[~common].sum()[None]))
    assert len(expected) > 2, "nearly all probability lies on one outcome: draw more, or from a flatter distribution"
    statistic = ((counts - expected).square() / expected.clamp(min=1e-9)).sum()
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    p_value = torch.special.gammaincc(degrees, statistic / 2).item()
    assert p_value > P_VALUE, f"chi-square {statistic:.1f} over {len(expected)} outcomes: p = {p_value:.1e}"
