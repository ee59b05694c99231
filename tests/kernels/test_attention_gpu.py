"""The compiled kernels against float64 over the whole cross, in a CUDA graph, and flash-attn where it is installed."""

import dataclasses
from typing import Any

import pytest
import torch

from nanovllm.attention import select_backend
from nanovllm.attention.interface import AttentionBackend, write_kv
from tests.kernels.attention_cases import Case, Lengths, behind_long_contexts, check, make_case, paged_inputs

pytestmark = pytest.mark.gpu

# Relative to a row's size. PyTorch's own kernel is off by up to 1.6e-6, 4e-4 and 3.5e-3 on these cases.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))

# The borders of tiles and blocks, and contexts that one piece, a few pieces and every piece of the grid has a part of.
DECODE: Lengths = [
    (1, n) for n in (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 850, 1600, 5000)
]
VERIFY: Lengths = [(1, 40), (2, 2), (1, 65), (2, 129), (2, 1000), (2, 3000)]
PREFILL: Lengths = [
    (1, 1),
    (1, 700),
    (2, 50),
    (17, 17),
    (64, 64),
    (65, 65),
    (100, 300),
    (128, 257),
    (300, 301),
    (513, 5000),
]
PREFILL += [(1200, 1200)]
# Few new tokens behind long contexts: tiles of queries whose keys are cut into many pieces, into two and into none.
BEHIND: Lengths = [(1, 3000), (1, 40), (3, 2049), (17, 9000), (64, 4100), (130, 1700), (100, 100)]


def make_backend(name: str, case: Case) -> AttentionBackend:
    return select_backend(name, case.q.device, case.q.shape[-1], case.kv.shape[2], case.q.dtype)


@DTYPES
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_triton(head_dim: int, block_size: int, group: int, dtype: torch.dtype) -> None:
    verify = [VERIFY] if group in (2, 3) else []  # a kernel of its own, and it takes seconds to compile
    for lengths in (DECODE, PREFILL, *verify):
        case = make_case(
            lengths, group=group, head_dim=head_dim, block_size=block_size, dtype=dtype, device="cuda", num_kv_heads=2
        )
        check(make_backend("triton", case), case, TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("window", [1, 100, 512, 1024])
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_windows(head_dim: int, block_size: int, window: int, dtype: torch.dtype) -> None:
    """On Hopper as on any GPU, since its own kernels know no windows. Tiles by TMA, by pointers, and masked ones."""
    for lengths in (DECODE, PREFILL, VERIFY):
        shape: dict[str, Any] = {"head_dim": head_dim, "block_size": block_size, "group": 3 if head_dim == 64 else 2}
        case = make_case(lengths, dtype=dtype, device="cuda", num_kv_heads=2, window=window, **shape)
        check(make_backend("triton", case), case, TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize(("head_dim", "group", "window"), [(128, 2, 0), (64, 3, 0), (256, 4, 1500), (128, 8, 1500)])
@pytest.mark.parametrize("block_size", [16, 256])
def test_few_queries_behind_long_contexts(
    block_size: int, head_dim: int, group: int, window: int, dtype: torch.dtype
) -> None:
    shape: dict[str, Any] = {"head_dim": head_dim, "group": group, "block_size": block_size, "window": window}
    case = behind_long_contexts(make_case(BEHIND, num_kv_heads=2, dtype=dtype, device="cuda", **shape))
    backend: Any = make_backend("triton", case)
    check(backend, case, TOLERANCE[dtype])
    (workspace,) = backend._prefill_workspaces.values()
    workspace.m.fill_(float("nan"))
    check(backend, case, TOLERANCE[dtype])
    assert workspace.m[:, 0].isfinite().all(), "nothing was cut"


def test_one_graph_cuts_contexts_of_every_length() -> None:
    """Recorded with short contexts, of which none is cut, and replayed with long ones."""
    lengths: list[Lengths] = [[(n, n) for n, _ in BEHIND], BEHIND]
    cases = [
        make_case(of, num_kv_heads=8, head_dim=128, block_size=256, dtype=torch.bfloat16, device="cuda")
        for of in lengths
    ]
    short, long = cases
    meta = dataclasses.replace(
        behind_long_contexts(short).meta,
        num_decodes=0,
        block_table=torch.zeros_like(long.meta.block_table),
        max_context_len=9000,
    )
    q, kv, backend = short.q.clone(), long.kv.nan_to_num(0.0), make_backend("triton", long)
    backend.attend(q, kv, meta, long.scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend(q, kv, meta, long.scale)
    q.copy_(long.q)
    kv.copy_(long.kv)
    meta.context_len.copy_(long.meta.context_len)
    meta.block_table.copy_(long.meta.block_table)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        error = (out.double() - long.expected).norm(dim=-1) / long.expected.norm(dim=-1)
        assert error.max() <= TOLERANCE[torch.bfloat16]


def test_layers_with_and_without_a_window_in_one_step() -> None:
    """Two plans and two kernels, whose launches overlap: the second layer of each kind finds its own plan."""
    for lengths in (DECODE * 2, VERIFY * 4, PREFILL):
        cases = [
            make_case(lengths, head_dim=128, block_size=256, dtype=torch.bfloat16, device="cuda", window=window)
            for window in (300, 0)
        ]
        backend, shared = make_backend("triton", cases[0]), dict[Any, Any]()
        for case in (*cases, *cases[::-1], *cases):
            out = backend.attend(case.q, case.kv, case.meta, case.scale, shared, case.window)
            error = (out.double() - case.expected).norm(dim=-1) / case.expected.norm(dim=-1)
            assert error.max() <= TOLERANCE[torch.bfloat16], (case.window, error.max())


def test_one_graph_serves_every_length_in_a_window() -> None:
    recorded, replayed = (
        make_case([(1, n) for n in lengths], head_dim=128, dtype=torch.bfloat16, device="cuda", seed=seed, window=200)
        for seed, lengths in enumerate([(3, 3, 3, 3), (2500, 700, 16, 300)])
    )
    meta = dataclasses.replace(
        recorded.meta, block_table=torch.zeros_like(replayed.meta.block_table), max_context_len=4096
    )
    q, kv, backend = torch.randn_like(replayed.q), replayed.kv.nan_to_num(0.0), make_backend("triton", replayed)

    def step() -> torch.Tensor:
        return backend.attend(q, kv, meta, replayed.scale, window=200)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    q.copy_(replayed.q)
    kv.copy_(replayed.kv)
    meta.context_len.copy_(replayed.meta.context_len)
    meta.block_table.copy_(replayed.meta.block_table)
    graph.replay()
    error = (out.double() - replayed.expected).norm(dim=-1) / replayed.expected.norm(dim=-1)
    assert error.max() <= TOLERANCE[torch.bfloat16]


def test_a_window_saves_what_lies_before_it() -> None:
    """A decode batch of long contexts takes a fraction of the time, since only tiles in the window are read.

    Other processes may use the card meanwhile: rounds with and without the window alternate, and the least time counts.
    """
    lengths: Lengths = [(1, 16000)] * 32
    case = make_case(lengths, num_kv_heads=8, head_dim=128, block_size=256, dtype=torch.bfloat16, device="cuda")
    backend, shared = make_backend("triton", case), dict[Any, Any]()
    times: dict[int, list[float]] = {0: [], 1024: []}
    for _ in range(11):  # the first of them compiles
        for window, rounds in times.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(20):
                backend.attend(case.q, case.kv, case.meta, case.scale, shared, window)
            end.record()
            end.synchronize()
            rounds.append(begin.elapsed_time(end))
    assert min(times[1024]) < min(times[0]) / 4, times


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("group", [2, 5, 7])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_prefill_by_tma(head_dim: int, group: int, dtype: torch.dtype) -> None:
    """A block that is one box, groups that leave rows idle, and the layout by pointers beside the one by TMA."""
    from nanovllm.kernels.attention.paged_prefill import paged_prefill, prefill_config
    from nanovllm.kernels.launch import is_hopper
    from tests.kernels.as_card import as_card

    block_size = 64
    case = make_case(PREFILL, group=group, head_dim=head_dim, block_size=block_size, dtype=dtype, device="cuda")
    if not is_hopper(case.q.device):
        pytest.skip("the layout with TMA is for Hopper GPUs")
    check(make_backend("triton", case), case, TOLERANCE[dtype])
    layouts = []
    for card in (9, 0), (8, 0):
        with as_card(card):
            layouts.append(prefill_config(case.q.device, head_dim, case.q.element_size(), block_size))
    assert [layout.tma for layout in layouts] == [True, False]
    outs = []
    for layout in layouts:
        outs.append(torch.zeros_like(case.q))
        paged_prefill(paged_inputs(case, outs[-1]), layout, first_sequence=2)
        assert not outs[-1][:2].any()  # the rows of the decodes are left alone
    error = (outs[0].double() - outs[1].double()).norm(dim=-1)[2:] / case.expected.norm(dim=-1)[2:]
    assert error.max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("plain", [False, True], ids=["chosen", "plain"])
@DTYPES
def test_triton_decodes_large_batches(dtype: torch.dtype, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences than pieces, and the wide variant of the search for one's sequence. By the kernel that is chosen,
    on Hopper the ring, and by the one for any GPU."""
    from nanovllm.attention import triton_backend

    lengths = [(1, 1 + 37 * s % 900) for s in range(300)]
    case = make_case(lengths, num_kv_heads=8, head_dim=128, block_size=256, dtype=dtype, device="cuda")
    hopper = torch.cuda.get_device_capability() == (9, 0)
    ring = triton_backend.hopper_kernels(case.q.device).ring_decode
    assert (ring is not None) == hopper
    if ring is not None:
        assert (ring.ring_layout(case.q, case.kv, len(lengths)) is not None) == (dtype != torch.float32)
    if plain:
        monkeypatch.setattr(triton_backend, "hopper_kernels", lambda device: triton_backend.HopperKernels())
    check(make_backend("triton", case), case, TOLERANCE[dtype])


def test_prefill_of_many_sequences_recorded_and_again() -> None:
    """The wide variant of the search for one's sequence; a recording finds nothing left behind by the launch before."""
    from nanovllm.attention.triton_backend import hopper_kernels

    lengths: Lengths = [(1, 30), (1, 300), *((2 + 53 * s % 190, 200 + 7 * s) for s in range(60))]
    case = make_case(lengths, num_kv_heads=8, head_dim=128, block_size=256, dtype=torch.bfloat16, device="cuda")
    hopper = hopper_kernels(case.q.device).warp_specialized_prefill
    assert (hopper is not None) == (torch.cuda.get_device_capability() == (9, 0))
    assert hopper is None or hopper.fits(case.q, case.kv)
    backend = make_backend("triton", case)
    check(backend, case, TOLERANCE[torch.bfloat16])
    expected = backend.attend(case.q, case.kv, case.meta, case.scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend(case.q, case.kv, case.meta, case.scale)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("head_dim", [16, 32, 256])
def test_triton_other_head_dims(head_dim: int) -> None:
    for lengths in DECODE, PREFILL:
        case = make_case(lengths, head_dim=head_dim, dtype=torch.bfloat16, device="cuda")
        check(make_backend("triton", case), case, TOLERANCE[torch.bfloat16])


@DTYPES
def test_torch_ref(dtype: torch.dtype) -> None:
    for lengths in DECODE, VERIFY, PREFILL:
        case = make_case(lengths, dtype=dtype, device="cuda")
        check(make_backend("torch_ref", case), case, TOLERANCE[dtype])


@pytest.mark.parametrize("verify", [False, True], ids=["decode", "verify"])
def test_one_graph_serves_every_length(verify: bool) -> None:
    """Recorded with short contexts in other blocks, replayed with long ones: the recording may fix no length."""
    queries = 3 if verify else 1
    recorded, replayed = (
        make_case([(queries, n) for n in lengths], head_dim=128, dtype=torch.bfloat16, device="cuda", seed=seed)
        for seed, lengths in enumerate([(3, 3, 3, 3), (2500, 700, 16, 17)])
    )
    static = dataclasses.replace(
        replayed,
        q=torch.randn_like(replayed.q),
        kv=replayed.kv.clone().nan_to_num_(0.0),
        meta=dataclasses.replace(
            recorded.meta,
            query_start=recorded.meta.query_start.clone(),
            context_len=recorded.meta.context_len.clone(),
            block_table=torch.zeros_like(replayed.meta.block_table),
            max_context_len=4096,
        ),
    )
    backend = make_backend("triton", static)
    assert backend.capturable

    def step() -> torch.Tensor:
        write_kv(static.kv, k, v, static.meta.slots)
        return backend.attend(static.q, static.kv, static.meta, static.scale)

    k, v = torch.zeros(2, *static.q.shape[:1], *static.kv.shape[-2:], dtype=torch.bfloat16, device="cuda")
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    rows = replayed.kv.flatten(1, 2)[:, replayed.meta.slots]  # what the step itself writes
    for target, source in (
        (k, rows[0]),
        (v, rows[1]),
        (static.q, replayed.q),
        (static.kv, replayed.kv),
        (static.meta.slots, replayed.meta.slots),
        (static.meta.context_len, replayed.meta.context_len),
        (static.meta.block_table, replayed.meta.block_table),
    ):
        target.copy_(source)
    static.kv.flatten(1, 2)[:, replayed.meta.slots] = 0.0
    graph.replay()
    error = (out.double() - replayed.expected).norm(dim=-1) / replayed.expected.norm(dim=-1)
    assert error.max() <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("block_size", [16, 128, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_flash_attn(head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    cases = [
        make_case(
            lengths, group=group, head_dim=head_dim, block_size=block_size, dtype=dtype, device="cuda", window=window
        )
        for lengths in (DECODE, PREFILL)
        for group, window in ((2, 0), (3, 0), (2, 200))
    ]
    try:
        backend = make_backend("flash_attn", cases[0])
    except ValueError as error:
        pytest.skip(str(error))
    for case in cases:
        case.kv.nan_to_num_(0.0)  # the library's paged kernels load V beyond the context, so it must be finite there
        check(backend, case, TOLERANCE[dtype])
