"""`ring_decode` on a Hopper GPU, beside `paged_decode` and float64."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.attention.triton_backend import hopper_kernels
from nanovllm.kernels.attention.paged_decode import (
    DecodeConfig,
    DecodeWorkspace,
    decode_config,
    paged_decode,
    plan_decode,
)
from nanovllm.kernels.hopper.ring_decode import RingLayout, ring_decode, ring_layout
from tests.kernels.attention_cases import Case, Lengths, as_single_tokens, make_case, paged_inputs
from tests.kernels.test_attention_gpu import DECODE, TOLERANCE, VERIFY

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper() -> None:
    if hopper_kernels(torch.device("cuda", torch.cuda.current_device())).ring_decode is None:
        pytest.skip("no Hopper GPU, or no Gluon")


class Decode:
    """One of the two kernels, with a workspace full of NaN. pieces: None for as many as fit the GPU."""

    def __init__(self, case: Case, layout: RingLayout | DecodeConfig, pieces: int | None = None) -> None:
        self.case, self.layout = case, layout
        self.config = layout.config if isinstance(layout, RingLayout) else layout
        num_sms = torch.cuda.get_device_properties(case.q.device).multi_processor_count
        num_kv_heads, num_heads = case.kv.shape[3], case.q.shape[1]
        pieces = pieces or num_sms * self.config.programs_per_sm // num_kv_heads
        queries = 16 // (num_heads // num_kv_heads) if case.meta.max_query_len > 1 else 1
        self.workspace = DecodeWorkspace.allocate(pieces, queries, num_heads, case.q.shape[2], case.q.device)
        for part in (self.workspace.m, self.workspace.denom, self.workspace.acc):
            part.fill_(float("nan"))

    def plan(self) -> Tensor:
        return plan_decode(self.case.meta.context_len, self.workspace.m.shape[0], self.config)

    def __call__(self, q: Tensor, kv: Tensor, out: Tensor, plan: Tensor, overlap: bool = False) -> Tensor:
        inputs = paged_inputs(dataclasses.replace(self.case, q=q, kv=kv), out)
        if isinstance(self.layout, RingLayout):
            ring_decode(inputs, self.workspace, plan, self.layout, overlap)
        else:
            paged_decode(inputs, self.workspace, plan, self.layout, overlap)
        return out


def layout_for(case: Case, num_sequences: int = 16) -> RingLayout:
    found = ring_layout(case.q, case.kv, num_sequences)
    assert found is not None
    return found


def error_of(out: Tensor, expected: Tensor) -> float:
    error = (out.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    return float(error.nan_to_num(float("inf")).max())


def check(case: Case, pieces: int | None = None) -> None:
    """Both rings against float64, and against the other kernel; with overlap and without, over what was left the time
    before."""
    small, large = layout_for(case), layout_for(case, 64)
    assert small != large
    for layout in (small, large):
        check_layout(case, layout, pieces)


def check_layout(case: Case, layout: RingLayout, pieces: int | None) -> None:
    limit = TOLERANCE[case.q.dtype]
    ring = Decode(case, layout, pieces)
    plain = Decode(case, decode_config(case.q.device, case.q.shape[2], 2), pieces)
    expected = plain(case.q, case.kv, torch.full_like(case.q, float("nan")), plain.plan())
    first: Tensor | None = None
    for overlap in (False, True, True):
        plan, out = ring.plan(), torch.full_like(case.q, float("nan"))
        out = ring(case.q.clone(), case.kv, out, plan, overlap)
        first = out if first is None else first
        assert torch.equal(out, first)
        assert error_of(out, case.expected) <= limit
        assert error_of(out, expected) <= limit


# Each takes several kernels, with overlap and without, for one query and for a few: tens of seconds to compile.
SHAPES = [  # head_dim, block size, KV heads, group, dtype
    (128, 256, 8, 2, torch.bfloat16),
    (128, 256, 8, 2, torch.float16),
    (128, 32, 8, 4, torch.bfloat16),
    (128, 256, 4, 8, torch.bfloat16),
    (128, 32, 4, 1, torch.float16),
    (128, 256, 4, 16, torch.bfloat16),
    (64, 256, 8, 8, torch.bfloat16),
    (64, 32, 4, 2, torch.bfloat16),
    (64, 256, 8, 4, torch.float16),
    (64, 32, 12, 1, torch.bfloat16),
]


@pytest.mark.parametrize(("head_dim", "block_size", "num_kv_heads", "group", "dtype"), SHAPES)
def test_against_both(head_dim: int, block_size: int, num_kv_heads: int, group: int, dtype: torch.dtype) -> None:
    for lengths in (DECODE, VERIFY) if group <= 8 else (DECODE,):
        case = make_case(
            lengths, group=group, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype,
            device="cuda",
        )  # fmt: skip
        check(case)


@pytest.mark.parametrize("pieces", [None, 1, 2, 5, 300])
def test_many_sequences_few_tiles_and_borders(pieces: int | None) -> None:
    """More sequences than pieces, fewer tiles than pieces, and contexts at the borders of tiles and blocks."""
    problems: list[Lengths] = [
        [(1, 1 + 37 * s % 900) for s in range(300)],
        [(1, 1), (1, 2), (1, 33)],
        [(1, 32 * i + d) for i in (1, 2, 3, 8, 16) for d in (-1, 0, 1)],
        [(4, 32 * i + d) for i in (1, 2, 3, 8, 16) for d in (0, 1, 2, 3, 4)],
    ]
    for lengths in problems:
        case = make_case(lengths, num_kv_heads=8, head_dim=128, block_size=256, dtype=torch.bfloat16, device="cuda")
        check(case, pieces)


@triton.jit
def late_write_kernel(new_ptr, kv_ptr, slots_ptr, num_tokens, v_offset, WIDTH: tl.constexpr, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Lets its successor start at once, then takes its time to write the new keys and values [2, T, WIDTH]."""
    gdc_launch_dependents()
    gdc_wait()
    for i in range(ROUNDS):
        tl.inline_asm_elementwise(
            "nanosleep.u32 1000; mov.u32 $0, $1;", "=r,r", [i], dtype=tl.int32, is_pure=False, pack=1
        )
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    element = tl.arange(0, WIDTH)
    tl.store(kv_ptr + slot * WIDTH + element, tl.load(new_ptr + token * WIDTH + element))
    value = tl.load(new_ptr + (num_tokens + token) * WIDTH + element)
    tl.store(kv_ptr + v_offset + slot * WIDTH + element, value)


class Step:
    """A step of three layers on static tensors: new keys, which come late, then attention."""

    def __init__(self, full: Case) -> None:
        self.full = full
        meta = full.meta
        self.case = dataclasses.replace(full, meta=dataclasses.replace(meta, context_len=meta.context_len.clone()))
        self.kvs = [full.kv.clone() for _ in range(3)]
        self.slots = meta.slots.clone()  # [T]
        num_tokens, width = len(self.slots), full.kv.shape[3] * full.kv.shape[4]
        self.new = torch.zeros(3, 2, num_tokens, width, dtype=full.q.dtype, device=full.q.device)
        self.q = torch.zeros(3, *full.q.shape, dtype=full.q.dtype, device=full.q.device)
        self.outs = torch.zeros_like(self.q)
        self.ring = Decode(self.case, layout_for(full))
        self.plain = Decode(self.case, decode_config(full.q.device, full.q.shape[2], 2))

    def __call__(self) -> None:
        plan = self.ring.plan()
        for layer, kv in enumerate(self.kvs):
            late_write_kernel[(len(self.slots),)](
                self.new[layer], kv, self.slots, len(self.slots), kv.stride(0), WIDTH=self.new.shape[-1], ROUNDS=200,
                num_warps=1, launch_pdl=True,
            )  # fmt: skip
            self.ring(self.q[layer], kv, self.outs[layer], plan, overlap=layer > 0)

    def load(self, context_len: Tensor, seed: int) -> None:
        """Other contexts [S]; what lies beyond them, and what the step itself will write, is NaN."""
        full, meta = self.full, self.case.meta
        random = torch.Generator(full.q.device).manual_seed(seed)
        block_size, rows = full.kv.shape[2], self.new.shape[-1]
        query_len = meta.query_start.diff().long()
        row = torch.repeat_interleave(torch.arange(len(query_len), device=full.q.device), query_len)
        token = torch.arange(len(row), device=full.q.device)
        position = context_len.long()[row] - (meta.query_start[1:].long()[row] - token)
        self.slots.copy_(meta.block_table[row, position // block_size].long() * block_size + position % block_size)
        meta.context_len.copy_(context_len)
        self.outs.fill_(float("nan"))
        longest = torch.zeros(full.kv.shape[1], block_size, dtype=torch.bool, device=full.q.device)
        for blocks, length in zip(meta.block_table.tolist(), context_len.tolist(), strict=True):
            for i, block in enumerate(blocks[: -(-length // block_size)]):
                longest[block, : length - i * block_size] = True  # several rows may be tokens of one sequence
        for layer, kv in enumerate(self.kvs):
            kv.normal_(generator=random)
            kv[:, ~longest] = float("nan")
            self.q[layer].normal_(generator=random)
            old = kv.view(2, -1, rows)
            self.new[layer].copy_(old[:, self.slots])
            old[:, self.slots] = float("nan")

    def expected(self) -> list[Tensor]:
        plan = self.plain.plan()
        return [self.plain(q, kv, torch.zeros_like(q), plan) for q, kv in zip(self.q, self.kvs, strict=True)]


def contexts(num: int, least: int, most: int) -> Iterator[Tensor]:
    """Twenty sets of them, with borders of tiles and blocks among them."""
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        found = torch.randint(least, most + 1, (num,), generator=random)
        found[seed % num] = max(least, 32 * (1 + seed % 4))
        found[(seed + 7) % num] = max(least, 32 * (1 + seed % 8) + 1)
        found[(seed + 13) % num] = most if seed % 2 else least
        yield found.int()


@pytest.mark.parametrize("kind", ["decodes", "guesses verified", "tokens of a row apart"])
@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
def test_old_keys_alone_are_read_before_the_predecessor_has_ended(kind: str, recorded: bool) -> None:
    """Twenty steps with changing contexts, one right behind the other, whose new keys come late."""
    queries, most, num = 1 if kind == "decodes" else 4, 600, 24
    full = make_case(
        [(queries, most)] * num, num_kv_heads=8, head_dim=128, block_size=64, dtype=torch.bfloat16, device="cuda"
    )
    apart = kind == "tokens of a row apart"
    step = Step(as_single_tokens(full) if apart else full)
    rounds = [c.cuda() for c in contexts(num, 40, most)]
    if apart:
        offset = torch.arange(1 - queries, 1, dtype=torch.int32, device="cuda")
        rounds = [(c[:, None] + offset).flatten() for c in rounds]
    step.load(rounds[0], 0)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    wrong = []
    for seed, context_len in enumerate(rounds):
        step.load(context_len, seed)
        if recorded:
            graph.replay()
        else:
            step()
        for layer, (out, expected) in enumerate(zip(step.outs, step.expected(), strict=True)):
            error = error_of(out, expected)
            if error > TOLERANCE[torch.bfloat16]:
                wrong.append((seed, layer, error))
    assert not wrong
