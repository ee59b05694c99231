"""A CUDA graph for people without a GPU: operations of torch are written down once, and carried out again on demand.

It has the two properties that matter. What was a number when it was recorded stays that number for ever: only the
contents of tensors can change from one replay to the next. And whoever asks for the value of a tensor while recording
is refused, as a GPU would have to stop and answer. It saves no time: every operation is launched again from Python.
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
    """What happens in `with tape:` is recorded. Every intermediate result keeps its place in memory."""

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
        """Carry everything out again, each result into the memory of the old one."""
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # else a view, or done in place
                    old.copy_(new)


class TapeGraph:
    """In the place of `CUDAGraph` in stage 6: replay() gives what the function would give now."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self.tape = Tape()
        with torch.inference_mode(), self.tape:
            self.output = function()

    def replay(self) -> Tensor:
        self.tape.play()
        return self.output
