"""Stage 2's parts: the rectangle of keys and values, and its batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.checkpoint import read_config
from stages.core import SamplingParams, Sequence
from tests.oracle_record import Recorder
from tests.stages.likely import check, exercise, same
from tests.stages.requests import greedy, random_prompts
from tests.stages.subject import Subject, since
from tests.weights import lively_qwen3


@pytest.mark.parametrize("positions", [[[3], [1]], [[0, 1, 2], [0, 1, 2]]], ids=["decode", "prefill"])
@exercise("2.1")
def test_new_keys_and_values_land_in_their_row_and_column(
    subject: Subject, checkpoints: Path, positions: list[list[int]]
) -> None:
    config = replace(read_config(lively_qwen3(checkpoints)), dtype=torch.float32)
    cache = subject.part("KVCache")(config, 2, 6, torch.device("cpu"))
    cells = [(row, position) for row, columns in enumerate(positions) for position in columns]
    k, v = (torch.randn(len(cells), 2, 32) for _ in range(2))  # row after row
    mask = torch.arange(4) <= torch.tensor(positions)[:, None, :, None]
    cache.attend(torch.tensor(positions), mask, 1, torch.randn(len(cells), 4, 32), k, v)
    for name, stored, new in (("keys", cache.k, k), ("values", cache.v, v)):
        for i, cell in enumerate(cells):
            found = [tuple(at) for at in (stored[1] == new[i]).all(-1).all(-1).nonzero().tolist()]
            elsewhere = f"cells (row, column) that hold the {name} of the token of row {cell[0]}, position {cell[1]}"
            likely = {
                "the new keys or values were never written (indexing with tensors makes a copy, so assign)": [],
                "the new tokens are written to columns 0 to Q - 1": [(cell[0], i)],
            }
            likely |= {"k and v are laid out row after row: unflatten(0, (B, Q))": [(1, 0)]}
            likely |= {
                "each token is written to every row: the row numbers must be a column [B, 1]": [
                    (0, cell[1]),
                    (1, cell[1]),
                ]
            }
            columns = sorted({position for row in positions for position in row})
            likely |= {"in the columns of all rows: row r has positions[r]": [(cell[0], p) for p in columns]}
            check(elsewhere, found, [cell], likely)
            stored[1][cell] = 0
        check(f"other {name} that were written, as (layer, row, column)", cells_of(stored), [])


def cells_of(stored: torch.Tensor) -> list[list[int]]:
    """Layer, row and column of all that is not zero in [layers, B, L, Hkv, D]."""
    return (stored != 0).any(-1).any(-1).nonzero().tolist()


class Stub:
    """A model whose logits are its hidden states plus 100."""

    def __init__(self) -> None:
        self.input_ids = self.positions = torch.empty(0)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        """-> [T, 1], the index of each token among the T"""
        self.input_ids, self.positions = input_ids, positions
        q = torch.zeros(len(input_ids), 1, 1)
        attend(0, q, q, q)
        return torch.arange(len(input_ids)).float()[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + 100


class Masks:
    """A cache that keeps the mask which it is given."""

    def __init__(self) -> None:
        self.mask = torch.empty(0)

    def attend(self, positions: torch.Tensor, mask: torch.Tensor, *_: Any) -> None:
        self.mask = mask


def batch_of(*lengths: int) -> list[Sequence]:
    """Sequences of tokens 10, 11, ... for the first, 20, 21, ... for the second: 2 of them are the prompt's."""
    return [
        Sequence(i, [10 * i + 10 + j for j in range(n)], 2, SamplingParams(0, 9), seed=0) for i, n in enumerate(lengths)
    ]


LOGITS = "logits (here: the index of a token in the flat rectangle, plus 100)"


@exercise("2.2")
def test_prefill_scores_the_last_token_of_each_prompt(subject: Subject, checkpoints: Path) -> None:
    """Prompts of 2, 4 and 1 tokens in a rectangle of 3 x 4. One ends with token 0."""
    engine = subject.engine(lively_qwen3(checkpoints))
    engine.model = Stub()
    engine.forward = lambda cache, input_ids, positions: torch.arange(input_ids.numel()).float().view(3, 4, 1)
    batch = batch_of(2, 4, 1)
    batch[1].token_ids[-1] = 0
    for seq in batch:
        seq.num_prompt_tokens = len(seq.token_ids)
    right = torch.tensor([[101.0], [107], [108]])
    likely = {
        "the last column of the rectangle, which for short prompts is padding": torch.tensor([[103.0], [107], [111]]),
        "one token too far: the last of n tokens has the index n - 1": torch.tensor([[102.0], [107], [109]]),
        "one token too early": torch.tensor([[100.0], [106], [111]]),
        "padding is told by its id 0, but id 0 is a token like any other": torch.tensor([[101.0], [106], [108]]),
        "these are hidden states: self.model.logits turns them into scores": right - 100,
        "all columns of these rows: hidden[rows, last] takes one of each": (
            torch.arange(100.0, 112).view(3, 4, 1)[:, [1, 3, 0]]
        ),
    }
    check(LOGITS, engine.prefill(None, batch), right, likely)


@exercise("2.3")
def test_decode_runs_the_newest_token_of_each_sequence(subject: Subject, checkpoints: Path) -> None:
    """Texts of 3, 5 and 4 tokens, of which the second has finished: it runs along."""
    engine = subject.engine(lively_qwen3(checkpoints))
    given: list[torch.Tensor] = []

    def forward(cache: object, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        given[:] = input_ids, positions
        return torch.arange(input_ids.numel()).float().view(*input_ids.shape, 1)

    engine.model, engine.forward = Stub(), forward
    logits = engine.decode(None, batch_of(3, 5, 4), {0, 2})
    ids, positions = given
    likely = {
        "the whole texts: their keys and values are in the cache, only the newest token is new": torch.tensor(
            [[10, 11, 12, 0, 0], [20, 21, 22, 23, 24], [30, 31, 32, 33, 0]]
        ),
        "the running sequences alone: cache and logits have a row for every sequence": torch.tensor([[12], [33]]),
        "the shape must be [B, 1], a column": torch.tensor([12, 24, 33]),
        "the last token of each prompt": torch.tensor([[11], [21], [31]]),
    }
    check("input ids", ids, torch.tensor([[12], [24], [33]]), likely)
    likely = {
        "one too far: positions count from 0, so the newest of n tokens stands at n - 1": torch.tensor([[3], [5], [4]]),
        "counted from the end of the prompt; positions count from the beginning of the text": torch.tensor(
            [[0], [2], [1]]
        ),
        "num_computed is counted from stage 3 on; here it stays 0": torch.zeros(3, 1, dtype=torch.int64),
        "the shape must be [B, 1], a column": torch.tensor([2, 4, 3]),
    }
    check("positions", positions, torch.tensor([[2], [4], [3]]), likely)
    right = torch.tensor([[100.0], [101], [102]])
    likely = {
        "forward gives [B, Q, H], and logits wants [B, H]: there is only one query, [:, 0]": right[:, None],
        "these are hidden states: self.model.logits turns them into scores": right - 100,
    }
    check(LOGITS, logits, right, likely)


@pytest.mark.parametrize("positions", [[[0, 1, 2], [0, 1, 2]], [[5], [2]]], ids=["prefill", "decode"])
@exercise("2.4")
def test_the_mask_lets_a_token_see_itself_and_what_came_before(
    subject: Subject, checkpoints: Path, positions: list[list[int]]
) -> None:
    engine, masks = subject.engine(lively_qwen3(checkpoints)), Masks()
    engine.model = Stub()
    at = torch.tensor(positions)  # [B, Q]
    engine.forward(masks, torch.zeros_like(at), at)
    assert masks.mask.dtype == torch.bool, (
        f"the mask has dtype {masks.mask.dtype} instead of bool, where True is visible"
    )
    context = max(map(max, positions)) + 1
    columns, own = torch.arange(context), at[:, None, :, None]
    if masks.mask.dim() == 4 and masks.mask.shape[-1] != context:
        short = f"the mask has {masks.mask.shape[-1]} columns, and the largest position is {context - 1}"
        raise AssertionError(f"{short}\nlikely: positions count from 0, so columns 0 to p are p + 1 columns")
    likely = {
        "a token does not see itself: < in place of <=": columns < own,
        "a token sees one more than itself": columns <= own + 1,
        "a token sees the tokens after it, not those before: reverse the comparison": columns > own,
        "every token sees every column: nothing is masked": (columns < context).expand(
            *at.shape[:1], 1, at.shape[1], -1
        ),
        "[B, Q, context]: a dimension for the heads is missing, [B, 1, Q, context]": columns <= at[:, :, None],
    }
    triangle = torch.ones(at.shape[1], context, dtype=torch.bool).tril()  # [Q, context]
    if same(masks.mask.squeeze(), triangle.squeeze()):
        raise AssertionError(
            f"mask of positions {positions}: of shape {[*masks.mask.shape]} instead of {[*(columns <= own).shape]}\n"
            "likely: a triangle starts at column 0; where a token stands is in `positions`, in each row another"
        )
    check(f"mask of positions {positions}", masks.mask, columns <= own, likely)


@since(2, 2)
def test_a_row_sees_its_own_past_and_nothing_else(subject: Subject, checkpoints: Path) -> None:
    """Everything that must be invisible is poisoned with NaN or huge values; the answer is that of attention alone."""
    config = replace(read_config(lively_qwen3(checkpoints)), dtype=torch.float32)
    cache = subject.part("KVCache")(config, 2, 6, torch.device("cpu"))
    cache.k.fill_(1e4)
    cache.v.fill_(1e4)
    lengths = [4, 2]
    past = [torch.randn(2, n, 2, 32) for n in lengths]
    for row, kv in enumerate(past):
        cache.k[0, row, : lengths[row]], cache.v[0, row, : lengths[row]] = kv
    positions = torch.tensor([[n - 1] for n in lengths])
    q, k, v = torch.randn(2, 4, 32), *(torch.stack([kv[i, -1] for kv in past]) for i in (0, 1))
    out = cache.attend(positions, torch.arange(4) <= positions[:, None, :, None], 0, q, k, v)
    for row, (keys, values) in enumerate(past):
        for head in range(4):
            weights = (keys[:, head // 2] @ q[row, head] * 32**-0.5).softmax(0)
            torch.testing.assert_close(out[row, head], weights @ values[:, head // 2])


@since(2, 2)
def test_a_token_is_computed_once(subject: Subject, checkpoints: Path) -> None:
    """One prefill of the prompt, then one token a step: that is the whole gain of the cache."""
    engine = subject.engine(lively_qwen3(checkpoints))
    recorder = Recorder.on(engine)
    [prompt] = random_prompts(7)
    [output] = engine.generate([prompt], greedy(5, ignore_eos=True))
    assert [step.input_ids for step in recorder.steps] == [prompt, *([token] for token in output[:-1])]
    assert [step.positions for step in recorder.steps] == [list(range(7)), [7], [8], [9], [10]]


@since(2, 2)
def test_a_batch_waits_for_its_slowest_sequence(subject: Subject, checkpoints: Path) -> None:
    """Static batches of max_num_seqs: that is what still hurts."""
    engine = subject.engine(lively_qwen3(checkpoints), max_num_seqs=2)
    recorder = Recorder.on(engine)
    params = [greedy(n, ignore_eos=True) for n in (2, 6, 3)]
    engine.generate(random_prompts(3, 5, 4), params)
    assert [len(step.input_ids) for step in recorder.steps] == [10, 2, 2, 2, 2, 2, 4, 1, 1]
