"""Stage 6 with layers that torch.compile has fused: what that saves is measured beside the recording itself."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from stages.model import Attend, Transformer
from stages.stage_6_cuda_graphs import CUDAGraphEngine


class CompiledModel:
    """A second model of the same weights, whose layers are compiled piece by piece around the call of attention."""

    def __init__(self, model: Transformer) -> None:
        torch.compiler.reset()  # the layers compiled for earlier engines count against a limit
        self.model = deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        for layer in self.model.layers:
            layer.compile(dynamic=True)
        self.attend: Attend
        # One function for all calls: for each new one the layers would be compiled again
        self.attend_outside: Any = torch.compiler.disable(lambda *inputs: self.attend(*inputs))

    def __call__(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """input_ids [T], positions [T] -> hidden [T, H]"""
        self.attend = attend
        hidden: Tensor = self.model(input_ids, positions, self.attend_outside)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


class CompiledEngine(CUDAGraphEngine):
    """Stage 6, recording the compiled model. Steps that are not replayed use the other one, as it is."""

    def record(self) -> Any:
        self.compiled: Any = CompiledModel(self.model)
        return super().record()

    def decode_step(self, bucket: int) -> Tensor:
        model, self.model = self.model, self.compiled
        try:
            return super().decode_step(bucket)
        finally:
            self.model = model
