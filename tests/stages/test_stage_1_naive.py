"""Stage 1's exercises."""

from pathlib import Path
from typing import Any

import torch

from stages.core import SamplingParams, Sequence, Trace, sample
from tests.oracle_explain import attention
from tests.stages.likely import check, exercise, same
from tests.stages.subject import Subject
from tests.weights import lively_qwen3


@exercise("1.1")
def test_a_token_sees_itself_and_all_before_it(subject: Subject) -> None:
    """Against attention written out: 6 query heads over 2 key/value heads, head_dim 8."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, heads, 8, generator=generator) for heads in (6, 2, 2))
    column, own = torch.arange(5), torch.arange(5)[:, None]
    right = attention(q, k, v, column <= own)  # [T, Hq, D]
    likely: dict[str, torch.Tensor | None] = {
        "every token sees all others, later ones too: is is_causal=True missing?": attention(q, k, v, column < 5),
        "[Hq, T, D]: put the tokens first again": right.transpose(0, 1),
        "heads and tokens are mixed up: transpose them back, reshape does not swap dimensions": right.transpose(
            0, 1
        ).reshape(right.shape),
        "the batch dimension that unsqueeze(0) added is still there": right[None],
        "neighbouring query heads share a key/value head: 0 to 2 the first, 3 to 5 the second, not by turns": attention(
            q, k.repeat(1, 3, 1), v.repeat(1, 3, 1), column <= own
        ),
    }
    out = subject.part("attend_to_all")(0, q, k, v)
    told = "attention wants [.., heads, T, D]: heads were put second, so they attended to each other"
    likely[told] = out if out.shape == (6, 5, 8) and not same(out, right.transpose(0, 1)) else None
    check("attention", out, right, likely)


@exercise("1.2")
def test_the_loop_samples_and_appends_until_the_sequence_is_over(subject: Subject, checkpoints: Path) -> None:
    """On scores that are written down: a token after the other, an end by EOS, and one by max_tokens."""
    engine = subject.engine(lively_qwen3(checkpoints))
    told: list[Any] = []
    engine.trace, engine.eos_token_ids = Trace(told.append), frozenset({9})

    def next_token_logits(seq: Sequence) -> torch.Tensor:
        """The next token is how many there are."""
        return torch.nn.functional.one_hot(torch.tensor([len(seq.token_ids)]), 512).float()

    engine.next_token_logits = next_token_logits
    likely = {
        "generation goes on after EOS: append_token returns whether the sequence is finished": [*range(2, 22)],
        "each token is there twice: append_token appends it": [n for n in range(2, 22, 2) for _ in range(2)],
        "generation ends after one token": [2],
        "the last token is left out": [*range(2, 9)],
    }
    for max_tokens, right in ((20, [*range(2, 10)]), (3, [2, 3, 4])):
        seq = Sequence(0, [7, 7], 2, SamplingParams(0, max_tokens), seed=0)
        engine.complete(seq)
        check(f"tokens, with max_tokens={max_tokens} and EOS 9", seq.output, right, likely)
    check("events", [e["type"] for e in told[-2:]], ["token", "finished"])
    seq, reference = (Sequence(0, [7, 7], 2, SamplingParams(100.0, 4, seed=1), seed=1) for _ in range(2))
    engine.complete(seq)
    for _ in range(4):
        reference.token_ids += sample(next_token_logits(reference), [reference])
    likely = {"the highest score always wins, whatever the temperature: use sample(logits, [seq])": [2, 3, 4, 5]}
    check("tokens at temperature 100, seed 1", seq.output, reference.output, likely)


@exercise("1.3")
def test_the_whole_text_goes_in_and_its_last_token_is_scored(subject: Subject, checkpoints: Path) -> None:
    engine = subject.engine(lively_qwen3(checkpoints))
    given: dict[str, list[int]] = {}

    class Model:
        def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
            given.update(ids=input_ids.tolist(), positions=positions.tolist())
            return torch.arange(len(input_ids)).float()[:, None]  # [T, 1], its index in the text

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + 100

    engine.model = Model()
    logits = engine.next_token_logits(Sequence(0, [5, 6, 7, 8], 2, SamplingParams(0, 9), seed=0))
    likely: dict[str, Any] = {
        "there is no dimension for a batch: the ids of all tokens are [T]": [[5, 6, 7, 8]],
        "the prompt alone, without what was generated": [5, 6],
        "the newest token alone: stage 1 keeps nothing, so the model must see the whole text": [8],
    }
    check("input ids", given["ids"], [5, 6, 7, 8], likely)
    check("positions", given["positions"], [0, 1, 2, 3], {"positions count from 0": [1, 2, 3, 4]})
    likely = {
        "the first token's, not the last one's": torch.tensor([[100.0]]),
        "all tokens' logits: only the last token has seen the whole text": torch.arange(100.0, 104)[:, None],
        "a batch of one keeps its first dimension: hidden[-1:]": torch.tensor([103.0]),
        "these are hidden states: self.model.logits turns them into scores": torch.tensor([[3.0]]),
    }
    check("logits (here: the index of the token, plus 100)", logits, torch.tensor([[103.0]]), likely)
