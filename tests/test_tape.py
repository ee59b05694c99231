"""The tape behaves as a CUDA graph does: numbers freeze, tensors are read anew, and nobody may ask for a value."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tools.pictures.decode_profile import TapeGraph


def test_tensors_are_read_anew_and_numbers_are_frozen() -> None:
    x, weights, factor = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 1.0], [0.0, 1.0]]), [2]
    total = torch.zeros(2)

    def step() -> Tensor:
        row = weights[0]  # a view
        total.add_(x)  # in place
        return (x @ weights) * factor[0] + row.sum()

    graph = TapeGraph(step)
    assert graph.output.tolist() == [4.0, 8.0]
    x.copy_(torch.tensor([3.0, 5.0]))
    weights[0, 1] = 0.0
    factor[0] = 100
    address = graph.output.data_ptr()
    assert graph.replay().tolist() == [2 * 3.0 + 1, 2 * 5.0 + 1]
    assert graph.replay().data_ptr() == address
    assert total.tolist() == [1 + 3 + 3, 2 + 5 + 5]


@pytest.mark.parametrize(
    "ask", [int, float, bool, Tensor.item, Tensor.nonzero, lambda x: 1 if x > 0 else 2, lambda x: x[x > 0]]
)
def test_whoever_asks_for_a_value_is_refused(ask: Callable[[Tensor], object]) -> None:
    def step() -> Tensor:
        ask(torch.tensor(1.0))
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="while recording there is none"):
        TapeGraph(step)
