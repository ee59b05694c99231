"""`fused_decode` on a Hopper GPU, beside the kernels that it replaces."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from nanovllm.attention.interface import Projected
from nanovllm.attention.triton_backend import TritonBackend, hopper_kernels
from nanovllm.kernels.fused.norm_rope_write import norm_rope_write
from tests.kernels.attention_cases import Case, Lengths, as_single_tokens, make_case
from tests.kernels.test_attention_gpu import TOLERANCE
from tests.kernels.test_ring_decode_gpu import error_of, late_write_kernel

pytestmark = pytest.mark.gpu
EPS, LAYERS = 1e-6, 3
CASES: list[Lengths] = [
    [(1, 700)],
    [(1, n) for n in (1, 2, 63, 64, 65, 66, 255, 256, 257, 850, 1600, 5000, 128, 129, 321)],
    [(1, 384)] * 8,
    [(4, 100), (2, 258), (5, 5), (3, 66), (1, 2000)],
    [(15, 140)],
]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if hopper_kernels(torch.device("cuda", torch.cuda.current_device())).fused_decode is None:
        pytest.skip("no Hopper GPU, or no Gluon")


class Step:
    """A step of three layers on static tensors, whose projections come late. fused: by one kernel."""

    def __init__(self, case: Case, group: int, with_norms: bool) -> None:
        self.case, meta = case, case.meta
        self.meta = replace(meta, context_len=meta.context_len.clone(), slots=meta.slots.clone())
        num_kv_heads, head_dim = case.kv.shape[3:]
        self.shape = len(meta.slots), (group + 2) * num_kv_heads, head_dim
        self.width = self.shape[1] * head_dim  # a power of two
        self.late = torch.zeros(LAYERS, 2, self.shape[0], self.width, dtype=case.q.dtype, device="cuda")
        self.new, self.tokens = torch.zeros_like(self.late), torch.arange(self.shape[0], device="cuda")
        weights = [torch.randn(head_dim, dtype=case.q.dtype, device="cuda") for _ in range(2)]
        self.norms = (weights[0], weights[1]) if with_norms else None
        self.table = torch.randn(5000, 2, head_dim // 2, device="cuda")
        self.kvs = [case.kv.clone() for _ in range(LAYERS)]
        self.backend = TritonBackend(torch.cuda.get_device_properties().multi_processor_count)

    def __call__(self, fused: bool = True) -> list[Tensor]:
        shared: dict[object, object] = {}
        outs, meta, positions = [], self.meta, self.meta.context_len - 1
        for layer, kv in enumerate(self.kvs):
            late_write_kernel[(self.shape[0],)](
                self.new[layer], self.late[layer], self.tokens, self.shape[0], self.late[layer].stride(0),
                WIDTH=self.width, ROUNDS=50, num_warps=1, launch_pdl=True,
            )  # fmt: skip
            qkv = self.late[layer, 0].view(self.shape)
            new = Projected(qkv, self.norms, self.table, positions, EPS)
            if fused:
                out = self.backend.attend_projected(new, kv, meta, self.case.scale, shared)
                assert out is not None
            else:
                q = norm_rope_write(qkv, kv, *new[1:4], meta.slots, EPS)
                out = self.backend.attend(q, kv, meta, self.case.scale, shared)
            outs.append(out)
        return outs

    def load(self, seed: int) -> None:
        """Other numbers; what lies behind the contexts, and what the step itself will write, is NaN."""
        torch.manual_seed(seed)
        self.new.normal_()
        self.late.fill_(float("nan"))
        for kv in self.kvs:
            kv.normal_()
            kv.masked_fill_(self.case.kv.isnan(), float("nan"))
            kv.flatten(1, 2)[:, self.meta.slots] = float("nan")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("num_kv_heads", "group", "with_norms"), [(8, 2, True), (2, 6, False), (1, 14, True)])
@pytest.mark.parametrize("lengths", CASES, ids=str)
def test_beside_the_kernels_that_it_replaces(
    lengths: Lengths, num_kv_heads: int, group: int, with_norms: bool, dtype: torch.dtype
) -> None:
    """Launched and recorded. The cache agrees within rounding, too."""
    shape = {"num_kv_heads": num_kv_heads, "group": group, "head_dim": 128, "block_size": 256}
    case = as_single_tokens(make_case(lengths, **shape, dtype=dtype, device="cuda"))  # type: ignore[arg-type]
    step = Step(case, group, with_norms)
    step.load(0)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for seed in range(5):
        step.load(seed)
        outs = step()
        written = [kv.clone() for kv in step.kvs]
        step.load(seed)
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(recorded, outs, strict=True))
        assert all(torch.equal(*(x.nan_to_num() for x in pair)) for pair in zip(step.kvs, written, strict=True))
        step.load(seed)
        for out, expected in zip(outs, step(fused=False), strict=True):
            assert error_of(out, expected) <= TOLERANCE[dtype]
        for kv, expected in zip(written, step.kvs, strict=True):
            pair = kv.flatten(1, 2), expected.flatten(1, 2)
            assert error_of(*(x[:, step.meta.slots] for x in pair)) <= TOLERANCE[dtype]
            for x in pair:
                x[:, step.meta.slots] = 0
            assert torch.equal(*(x.nan_to_num() for x in pair))
    assert not any(counts.any() for counts in step.backend._arrived.values())
