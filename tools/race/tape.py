"""A stand-in for a CUDA graph without a GPU: it records operations of torch once and runs them again on demand.

It has the two properties that matter. A Python number keeps the value that it had during the recording: only the
contents of tensors change from one replay to the next. And asking for the value of a tensor while recording is an
error, because a GPU would have to stop and answer. It saves no time: Python launches every operation again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
ASK_FOR_A_VALUE = (aten.item.default, aten._local_scalar_dense.default, aten.is_nonzero.default, aten.nonzero.default)


class Tape(TorchDispatchMode):
    """Records the operations within `with tape:`. Every intermediate result keeps its place in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASK_FOR_A_VALUE:
            raise RuntimeError(f"{func} asks for the value of a tensor, and while recording there is none yet")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.inference_mode()
    def play(self) -> None:
        """Run all operations again, and write each result into the memory of the old one."""
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # else a view, or done in place
                    old.copy_(new)


class TapeGraph:
    """Takes the place of `CUDAGraph` in stage 6: replay() returns what the function would return now."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self.tape = Tape()
        with torch.inference_mode(), self.tape:
            self.output = function()

    def replay(self) -> Tensor:
        self.tape.play()
        return self.output
