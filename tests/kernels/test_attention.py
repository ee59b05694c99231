"""The attention backends against float64, on a CPU: PyTorch over the whole cross, Triton through its interpreter."""

import dataclasses
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from nanovllm.attention.interface import AttentionBackend, AttentionMetadata, write_kv
from nanovllm.attention.torch_ref import TorchRefBackend
from tests.kernels.attention_cases import Case, Lengths, as_single_tokens, check, make_case, paged_inputs

FP32 = 1e-5

# Decodes, a draft of three verified, whole prompts, chunks behind a cached part; across and at the borders of blocks.
MIXED: Lengths = [(1, 1), (1, 16), (1, 17), (1, 300), (3, 40), (5, 5), (16, 32), (33, 100), (64, 64), (64, 257)]


def on_cpu(make: Callable[[], AttentionBackend]) -> AttentionBackend:
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU here; test_attention_gpu covers it")
    return make()


@pytest.fixture
def triton_backend() -> AttentionBackend:
    """Few programs, so that a sequence is cut into pieces and a piece spans several sequences."""
    pytest.importorskip("triton")
    from nanovllm.attention.triton_backend import TritonBackend

    return on_cpu(lambda: TritonBackend(num_sms=2))


@pytest.mark.parametrize("block_size", [1, 5, 16, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_torch_ref(head_dim: int, group: int, block_size: int) -> None:
    check(TorchRefBackend(), make_case(MIXED, group=group, head_dim=head_dim, block_size=block_size), FP32)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)], ids=str)
def test_torch_ref_in_16_bits(dtype: torch.dtype, tolerance: float) -> None:
    check(TorchRefBackend(), make_case(MIXED, dtype=dtype), tolerance)


def test_torch_ref_takes_contexts_of_every_size_in_one_batch() -> None:
    lengths = [(1, n) for n in (900, 1, 40, 41, 450, 449, 7, 899, 100)]
    check(TorchRefBackend(), make_case(lengths, num_kv_heads=1), FP32)


def test_torch_ref_bounds_what_it_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.attention.torch_ref.MAX_BYTES", 100 * 1024)  # 100 keys
    check(TorchRefBackend(), make_case([(1, 90), (1, 80), (1, 50), (1, 49), (1, 30), (2, 120)]), FP32)


def test_torch_ref_notices_that_a_step_changed() -> None:
    """The plan it keeps between layers must not outlive the step, whether the metadata is new or changed in place."""
    backend = TorchRefBackend()
    first = make_case([(1, 20), (1, 35), (4, 50)], seed=1)
    for lengths in [(1, 20), (1, 34), (4, 50)], [(1, 20), (2, 35), (4, 50)]:  # one number differs from the first
        check(backend, first, FP32)
        check(backend, make_case(lengths, seed=1), FP32)
    second = make_case([(1, 20), (1, 35), (4, 50)], seed=2)  # only the block table differs
    check(backend, first, FP32)
    check(backend, second, FP32)
    for name in ("query_start", "context_len", "block_table"):
        getattr(second.meta, name).copy_(getattr(first.meta, name))
    check(backend, dataclasses.replace(first, meta=second.meta), FP32)


def one_is_fast(fast: tuple[int, int], windows: list[int], block_sizes: list[int]) -> Any:
    sizes = product(windows, block_sizes)
    marked = [pytest.param(*size, marks=() if size == fast else pytest.mark.slow) for size in sizes]
    return pytest.mark.parametrize(("window", "block_size"), marked)


@one_is_fast((8, 5), [1, 2, 8, 16, 17, 60, 256, 1000], [1, 5, 16, 256])
def test_torch_ref_windows(window: int, block_size: int) -> None:
    """Windows that end within a block, at its border and in the block before; chunks longer than the window."""
    check(TorchRefBackend(), make_case(MIXED, block_size=block_size, window=window), FP32)


def test_layers_of_one_step_may_have_different_windows() -> None:
    backend, shared = TorchRefBackend(), dict[Any, Any]()
    for window in (8, 0, 20, 8):
        case = make_case(MIXED, window=window)
        out = backend.attend(case.q, case.kv, case.meta, case.scale, shared, window)
        assert (out.double() - case.expected).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("window", [1, 8, 33, 64, 100])
def test_triton_decode_windows(triton_backend: AttentionBackend, window: int, block_size: int) -> None:
    """Tiles before a window are in no piece; one tile is cut by it; and some contexts are shorter than the window."""
    lengths = [(1, 200), (1, 1), (1, 16), (1, 130), (1, 97)]
    check(triton_backend, make_case(lengths, block_size=block_size, num_kv_heads=1, window=window), FP32)


@pytest.mark.slow
def test_triton_merges_the_pieces_of_a_window() -> None:
    """20 tiles, of which 13 are in the window, in 8 pieces; some of two sequences, and a sequence in several."""
    pytest.importorskip("triton")
    from nanovllm.attention.triton_backend import TritonBackend

    backend = on_cpu(lambda: TritonBackend(num_sms=8))
    lengths = [(1, 620), (1, 5), (1, 333)]
    check(backend, make_case(lengths, group=8, num_kv_heads=1, head_dim=128, window=400), FP32)


@pytest.mark.slow
@pytest.mark.parametrize("window", [4, 30, 64])
def test_triton_verifies_drafts_in_windows(triton_backend: AttentionBackend, window: int) -> None:
    """The oldest query of a sequence sees keys that its last one does not."""
    lengths = [(1, 70), (5, 66), (2, 129), (3, 3), (5, 64 + window)]  # the last: a tile lies before its end's window
    check(triton_backend, make_case(lengths, group=3, num_kv_heads=1, window=window), FP32)


@one_is_fast((8, 16), [1, 8, 40, 100], [16, 256])
def test_triton_chunks_in_windows(triton_backend: AttentionBackend, window: int, block_size: int) -> None:
    """Tiles of keys that no query sees, that all see, and that some see: behind the window's begin, before its end, or
    both in one tile."""
    lengths = [(1, 40), (40, 173), (17, 17), (35, 36), (3, 260)]
    check(triton_backend, make_case(lengths, block_size=block_size, num_kv_heads=1, window=window), FP32)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 256])
def test_triton_decode_over_pieces(triton_backend: AttentionBackend, block_size: int, head_dim: int) -> None:
    lengths = [(1, 200), (1, 1), (1, 16), (1, 130)]
    check(triton_backend, make_case(lengths, block_size=block_size, head_dim=head_dim, num_kv_heads=1), FP32)


@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_triton_decode_groups(triton_backend: AttentionBackend, group: int) -> None:
    check(triton_backend, make_case([(1, 64), (1, 65), (1, 33)], group=group, num_kv_heads=2), FP32)


def test_triton_merges_many_pieces() -> None:
    """19 tiles in as many pieces, more than the merge takes at once; two heads score highest in the last of them."""
    pytest.importorskip("triton")
    from nanovllm.attention.triton_backend import TritonBackend

    backend = on_cpu(lambda: TritonBackend(num_sms=8))
    check(backend, make_case([(1, 600)], group=8, num_kv_heads=1, head_dim=128, seed=2), FP32)


@pytest.mark.slow
def test_triton_merges_many_pieces_among_many_sequences() -> None:
    """With many sequences the merge takes fewer parts at once; one sequence has more than that. Then the same in more
    pieces than tiles, of which some are empty."""
    pytest.importorskip("triton")
    from nanovllm.attention.triton_backend import TritonBackend
    from nanovllm.kernels.attention.paged_decode import FEW_PARTS, FEW_SEQUENCES

    lengths = [(1, 600), *[(1, 5 + s) for s in range(FEW_SEQUENCES + 1)], (1, 300)]
    for num_sms in (10, 25):  # fewer pieces than tiles, and more
        backend = on_cpu(lambda num_sms=num_sms: TritonBackend(num_sms))  # type: ignore[misc]
        check(backend, make_case(lengths, num_kv_heads=1, head_dim=128, seed=2), FP32)
        verified = [(n if context < 5 + n else 3, context) for n, context in lengths]
        check(backend, make_case(verified, num_kv_heads=1, head_dim=128, seed=2), FP32)
    assert FEW_PARTS < 10


def test_triton_verifies_drafts(triton_backend: AttentionBackend) -> None:
    """A few queries a sequence; some of them see no key at all in the last piece of their context."""
    check(triton_backend, make_case([(1, 70), (5, 66), (2, 129), (3, 3)], group=3, num_kv_heads=1), FP32)


@pytest.mark.parametrize(
    ("group", "block_size"),
    [
        (1, 16),
        (3, 256),
        (8, 16),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 256), (3, 16), (8, 256))),
    ],
)
def test_triton_chunks(triton_backend: AttentionBackend, group: int, block_size: int) -> None:
    lengths = [(1, 40), (40, 73), (17, 17), (35, 36)]
    check(triton_backend, make_case(lengths, group=group, block_size=block_size, num_kv_heads=1), FP32)


def test_triton_chunk_of_128_dimensions(triton_backend: AttentionBackend) -> None:
    check(triton_backend, make_case([(30, 50)], head_dim=128), FP32)


def test_triton_fp16(triton_backend: AttentionBackend) -> None:
    check(triton_backend, make_case([(1, 140), (20, 150)], dtype=torch.float16), 2e-3)


@pytest.mark.parametrize(("group", "block_size"), [(1, 16), (1, 256), (2, 64), (4, 16), (5, 32), (8, 16)])
def test_triton_chunks_by_tma(
    triton_backend: AttentionBackend, group: int, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles in shuffled blocks behind each other and several in one; a tile with masks after them, and before any."""
    from nanovllm.attention import triton_backend as module
    from nanovllm.kernels.attention.paged_prefill import PrefillConfig

    by_tma = PrefillConfig(rows=32, keys=16, num_warps=8, num_stages=2, tma=True, max_registers=128)
    monkeypatch.setattr(module, "prefill_config", lambda *_: by_tma)
    lengths = [(1, 40), (40, 113), (17, 17), (35, 36), (2, 64)]
    check(triton_backend, make_case(lengths, group=group, block_size=block_size), FP32)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 20, 70])
def test_triton_chunks_by_tma_in_windows(
    triton_backend: AttentionBackend, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A box has no masks: where some query does not see all of it, tiles come by pointers."""
    from nanovllm.attention import triton_backend as module
    from nanovllm.kernels.attention.paged_prefill import PrefillConfig

    by_tma = PrefillConfig(rows=32, keys=16, num_warps=8, num_stages=2, tma=True, max_registers=128)
    monkeypatch.setattr(module, "prefill_config", lambda *_: by_tma)
    lengths = [(1, 40), (40, 113), (17, 17), (35, 36), (2, 64)]
    check(triton_backend, make_case(lengths, block_size=64, window=window), FP32)


def test_boxes_lie_in_one_block() -> None:
    pytest.importorskip("triton")
    from nanovllm.kernels.attention.paged_prefill import PrefillConfig, paged_prefill

    case = make_case([(20, 30)], block_size=16)
    inputs = paged_inputs(case, torch.empty_like(case.q))
    by_tma = PrefillConfig(rows=32, keys=32, num_warps=8, num_stages=2, tma=True)
    with pytest.raises(ValueError, match="a box of 32 keys does not lie in one block of 16"):
        paged_prefill(inputs, by_tma)


@pytest.mark.parametrize(
    ("head_dim", "element_size", "block_size", "hopper", "tma"),
    [
        (128, 2, 256, True, True),
        (64, 2, 64, True, True),
        (128, 2, 32, True, False),
        (128, 2, 256, False, False),
        (256, 2, 256, True, False),
        (128, 4, 256, True, False),
        (128, 1, 64, True, True),
        (64, 1, 64, True, True),
        (64, 1, 32, True, False),
        (128, 1, 256, False, False),
    ],
)
def test_when_keys_come_by_tma(head_dim: int, element_size: int, block_size: int, hopper: bool, tma: bool) -> None:
    pytest.importorskip("triton")
    from nanovllm.kernels.attention.paged_prefill import prefill_config
    from nanovllm.kernels.launch import is_hopper
    from tests.kernels.as_card import as_card

    device = torch.device("cpu")
    with as_card((9, 0) if hopper else (8, 0)):
        config = prefill_config(device, head_dim, element_size, block_size)
    assert config.tma == tma
    assert not tma or config.keys <= block_size
    assert not is_hopper(device)


def padded(case: Case) -> Case:
    """The case as a graph would run it: two more sequences, of one query, in the scratch block."""
    meta, scratch = case.meta, case.kv.shape[1] - 1
    sequences, columns = meta.block_table.shape
    table = torch.full((sequences + 2, columns), scratch, dtype=torch.int32)
    table[:sequences] = meta.block_table
    last = meta.query_start[-1]
    rows = torch.cat((case.q, case.q[:2]))
    longer = AttentionMetadata(
        slots=torch.cat((meta.slots, torch.full((2,), scratch * case.kv.shape[2]))),
        query_start=torch.cat((meta.query_start, torch.tensor([last + 1, last + 2], dtype=torch.int32))),
        context_len=torch.cat((meta.context_len, torch.ones(2, dtype=torch.int32))),
        block_table=table,
        num_decodes=sequences + 2,
        max_query_len=1,
        max_context_len=4096,
    )
    return Case(rows, case.kv, longer, case.scale, case.expected)


@pytest.mark.parametrize("name", ["torch_ref", "triton"])
def test_write_then_attend_with_padding(name: str, request: pytest.FixtureRequest) -> None:
    """Written keys land in their slots and nowhere else, padding in the scratch block; padding changes no answer."""
    backend = TorchRefBackend() if name == "torch_ref" else request.getfixturevalue("triton_backend")
    case = padded(make_case([(1, 33), (1, 48), (1, 7)], num_kv_heads=3, group=1))
    slots = case.meta.slots
    rows = case.kv.flatten(1, 2)  # [2, num_slots, Hkv, D]
    new_k, new_v = rows[:, slots].clone()
    new_k[3:], new_v[3:] = 7.0, 8.0
    fused = torch.cat((new_k, new_v), 1)  # [T, 2 * Hkv, D], as a projection leaves them: the tokens are strided
    rows[:, slots] = float("nan")
    before = case.kv.clone()

    write_kv(case.kv, fused[:, :3], fused[:, 3:], slots)

    torch.testing.assert_close(rows[0, slots[:4]], new_k[:4], rtol=0, atol=0)
    torch.testing.assert_close(rows[1, slots[:4]], new_v[:4], rtol=0, atol=0)
    untouched = torch.ones(rows.shape[1], dtype=torch.bool)
    untouched[slots] = False
    torch.testing.assert_close(rows[:, untouched], before.flatten(1, 2)[:, untouched], rtol=0, atol=0, equal_nan=True)
    out = backend.attend(case.q, case.kv, case.meta, case.scale)
    torch.testing.assert_close(out[:3].double(), case.expected, rtol=FP32, atol=FP32)


@pytest.mark.parametrize("name", ["torch_ref", "triton"])
def test_queries_may_be_a_view_of_a_fused_projection(name: str, request: pytest.FixtureRequest) -> None:
    backend = TorchRefBackend() if name == "torch_ref" else request.getfixturevalue("triton_backend")
    case = make_case([(1, 20), (18, 30)], num_kv_heads=1)
    fused = torch.cat((case.q, torch.full_like(case.q, float("nan"))), 1)
    check(backend, dataclasses.replace(case, q=fused[:, : case.q.shape[1]]), FP32)


def with_a_nan_at_the_end(case: Case) -> Case:
    """The last key and value of every sequence with several queries are NaN: a guess, say, that computes nothing good.
    Of its last query nothing is expected any more; all others are before it."""
    meta, kv, expected = case.meta, case.kv.clone(), case.expected.clone()
    last = meta.query_start[1:][meta.query_start.diff() > 1].long() - 1
    kv.flatten(1, 2)[:, meta.slots[last]] = expected[last] = float("nan")
    return dataclasses.replace(case, kv=kv, expected=expected)


def check_all_but_the_last(backend: AttentionBackend, case: Case, asked: Case) -> None:
    good = case.expected.isfinite().all(-1).all(-1)
    assert 0 < good.sum() < len(good)
    out = backend.attend(case.q, case.kv, asked.meta, case.scale)
    assert not out[~good].isfinite().any()
    torch.testing.assert_close(out[good].double(), case.expected[good], rtol=FP32, atol=FP32)


@pytest.mark.parametrize("lengths", [MIXED, [(8, 8)], [(3, 20), (3, 40), (3, 31)]], ids=["mixed", "prompt", "ragged"])
def test_torch_ref_does_not_feel_a_later_key(lengths: Lengths) -> None:
    case = with_a_nan_at_the_end(make_case(lengths))
    check_all_but_the_last(TorchRefBackend(), case, case)


def test_triton_does_not_feel_a_later_key_in_a_recorded_step(triton_backend: AttentionBackend) -> None:
    """There each token is a decode of its own, which loads no key behind it."""
    case = with_a_nan_at_the_end(make_case([(1, 17), (3, 40), (5, 5), (4, 18)]))
    check_all_but_the_last(triton_backend, case, as_single_tokens(case))
