"""An experiment has to compute the same before it is worth measuring: the decode kernel that merges its own pieces."""

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.engine.merge_inside import COUNTERS, merge_inside
from nanovllm.attention.triton_backend import TritonBackend
from tests.kernels.attention_cases import Lengths, make_case

CASES: list[tuple[Lengths, int, int]] = [  # lengths, multiprocessors, group
    ([(1, 300), (1, 5), (1, 77)], 4, 2),
    ([(1, 1), (1, 2)], 20, 2),  # fewer tiles than pieces
    ([(1, 500)], 9, 4),
    ([(1, 7), (2, 40), (3, 90)], 5, 2),  # guesses are verified
    ([(1, n) for n in (16, 17, 64, 65, 128, 250, 1, 3)], 7, 1),
]


@pytest.mark.parametrize(("lengths", "num_sms", "group"), CASES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pieces_are_merged_by_the_last_to_arrive(lengths: Lengths, num_sms: int, group: int, device: str) -> None:
    case = make_case(lengths, group=group, device=device)
    with merge_inside([]):
        backend = TritonBackend(num_sms)
        for _ in range(3):  # the counters are as before
            out = backend.attend(case.q, case.kv, case.meta, case.scale)
            torch.testing.assert_close(out.double(), case.expected, atol=1e-5, rtol=1e-5)
    assert COUNTERS and not any(counter.any() for counter in COUNTERS.values())
