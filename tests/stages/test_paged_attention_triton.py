"""The teaching kernel against attention written out in float64: on Triton's interpreter here, compiled on a GPU."""

from itertools import accumulate
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from stages.core import SamplingParams, Sequence
from stages.paged_attention_triton import attend_in_place, paged_attention, paged_decode_attention
from tests.stages.requests import greedy, random_prompts
from tests.stages.subject import Subject, since
from tests.weights import lively_qwen3

Lengths = list[tuple[int, int]]  # (query_len, context_len) of each sequence


def check(
    lengths: Lengths,
    *,
    group: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tolerance: float = 1e-5,
) -> None:
    """Scatter random K and V into shuffled blocks, poison everything else, compare with float64 attention."""
    generator = torch.Generator().manual_seed(0)
    blocks_of = [-(-context // block_size) for _, context in lengths]
    order = torch.randperm(sum(blocks_of) + 3, generator=generator).tolist()  # three blocks belong to nobody
    table = torch.full((len(lengths), max(blocks_of) + 1), -1, dtype=torch.int32)
    cache = torch.full((2, len(order), block_size, num_kv_heads, head_dim), float("nan"))

    queries, expected = [], []
    for s, (query_len, context) in enumerate(lengths):
        blocks = [order.pop() for _ in range(blocks_of[s])]
        table[s, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        k, v = torch.randn(2, context, num_kv_heads, head_dim, generator=generator).to(dtype).float()
        q = torch.randn(query_len, num_kv_heads * group, head_dim, generator=generator).to(dtype).float()
        for position in range(context):
            cache[0, blocks[position // block_size], position % block_size] = k[position]
            cache[1, blocks[position // block_size], position % block_size] = v[position]
        queries.append(q)
        k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))  # [context, Hq, D]
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * head_dim**-0.5
        future = torch.arange(context) > torch.arange(context - query_len, context)[:, None]
        expected.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), v))

    start = torch.tensor([0, *accumulate(n for n, _ in lengths)], dtype=torch.int32)
    context_len = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    k_cache, v_cache = cache.to(device, dtype)
    inputs = (x.to(device) for x in (torch.cat(queries).to(dtype), table, start, context_len))
    q, table, start, context_len = inputs
    out = paged_attention(q, k_cache, v_cache, table, start, context_len)
    assert out.shape == q.shape
    assert out.dtype == dtype
    torch.testing.assert_close(out.cpu().double(), torch.cat(expected), rtol=tolerance, atol=tolerance)
    if all(query_len == 1 for query_len, _ in lengths):
        assert torch.equal(paged_decode_attention(q, k_cache, v_cache, table, context_len), out)


def test_the_tables_of_a_step() -> None:
    """A prefill, a chunk in the middle and a decode: as the kernel takes them."""
    work = []
    for table, known, computed, n in (([2, 6], 5, 0, 5), ([1, 4, 0], 9, 3, 4), ([5], 4, 3, 1)):
        seq = Sequence(0, [7] * known, known, SamplingParams(), 0, block_table=table, num_computed=computed)
        work.append((seq, n))
    step = attend_in_place(work, torch.device("cpu")).keywords
    assert step["query_start"].tolist() == [0, 5, 9, 10] and step["context_len"].tolist() == [5, 7, 4]
    tables = [row[:n] for row, n in zip(step["block_table"].tolist(), (2, 3, 1), strict=True)]
    assert tables == [[2, 6], [1, 4, 0], [5]]
    assert {tensor.dtype for tensor in step.values()} == {torch.int32}


DECODE = [(1, n) for n in (1, 2, 15, 16, 17, 32, 33, 65, 100)]
RAGGED = [(1, 1), (5, 5), (33, 100), (1, 40), (40, 73), (65, 65), (3, 90)]


GROUPS = pytest.mark.parametrize("group", [1, 3, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])


@GROUPS
def test_decode_matches_float64(group: int) -> None:
    check(DECODE, group=group)


@GROUPS
def test_chunks_of_many_lengths_match_float64(group: int) -> None:
    check(RAGGED, group=group)


@pytest.mark.parametrize(
    ("block_size", "head_dim"),
    [
        (16, 128),
        (32, 64),
        (256, 128),
        *(pytest.param(*s, marks=pytest.mark.slow) for s in ((16, 64), (32, 128), (256, 64))),
    ],
)
def test_block_sizes_and_head_dims(block_size: int, head_dim: int) -> None:
    check([(1, 40), (7, 60), (20, 20), (1, 257), (2, 258)], group=3, block_size=block_size, head_dim=head_dim)


def test_a_sequence_without_queries_is_skipped() -> None:
    check([(4, 20), (0, 30), (1, 9)])


def test_float16() -> None:
    check([(1, 50), (20, 70)], dtype=torch.float16, tolerance=2e-3)


@pytest.mark.parametrize(("block_size", "head_dim"), [(8, 64), (48, 64), (16, 96)])
def test_refuses_shapes_that_its_tiles_cannot_have(block_size: int, head_dim: int) -> None:
    for lengths in ([(1, 1)], [(2, 2)]):
        with pytest.raises(ValueError, match="use the gather"):
            check(lengths, block_size=block_size, head_dim=head_dim)
    cache = torch.zeros(2, block_size, 1, head_dim)
    one = torch.ones(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="use the gather"):
        paged_decode_attention(torch.zeros(1, 1, head_dim), cache, cache, one, one[0])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str
)
def test_compiled(dtype: torch.dtype, tolerance: float, group: int, block_size: int, head_dim: int) -> None:
    for lengths in (DECODE, [*DECODE, *RAGGED, (1, 2000), (300, 1500)]):
        check(
            lengths,
            group=group,
            block_size=block_size,
            head_dim=head_dim,
            dtype=dtype,
            device="cuda",
            tolerance=tolerance,
        )


@since(3, 3)
def test_the_kernel_gives_the_same_tokens_as_the_gather(subject: Subject, checkpoints: Path) -> None:
    """Through Triton's interpreter on a CPU."""
    path = lively_qwen3(checkpoints, head_dim=64, num_hidden_layers=1)
    prompts = random_prompts(18, 3)
    gather, kernel = (subject.engine(path, num_blocks=8, attention=a) for a in ("gather", "triton"))
    assert kernel.generate(prompts, greedy(3)) == gather.generate(prompts, greedy(3))
    with pytest.raises(ValueError, match=r"attention.*'flash'"):
        subject.engine(path, attention="flash")
