"""Weights in FP8 on their way from a checkpoint into a model: kept as they are, or widened.

What is read is a part of a weight, a rank's share, and the scales that belong to it. A part may begin anywhere in a
block: each row and column has the scale of the block that it lies in.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from nanovllm.distributed.group import Group
from nanovllm.layers.fp8_linear import FP8, Fp8Linear, Fp8MergedLinear, can_stay, quantise
from nanovllm.layers.linear import Linear, MergedLinear
from nanovllm.models.config import ModelConfig
from nanovllm.models.quantization import Fp8Format
from nanovllm.models.transformer import Transformer

logger = logging.getLogger(__name__)

FP8_DTYPE, FLOATS = "F8_E4M3", ("F32", "F16", "BF16", "F64")  # in the header of a safetensors file
Index = slice | tuple[slice, ...]


@dataclass(frozen=True)
class Whole:
    """A tensor in memory that is read like one in a file."""

    tensor: Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: Index) -> Tensor:
        return self.tensor[index]


@dataclass(frozen=True)
class Fp8Weight:
    """A weight [out, in] in FP8 with its scales, read like a tensor of safetensors (`get_slice`).

    What is read is widened to float32, on the device of the scales.

    values: read like such a tensor, too. scale: [ceil(out / rows), ceil(in / columns)] float32.
    """

    values: Any
    scale: Tensor
    rows: int
    columns: int

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Quantised here, by output channel."""
        values, scale = quantise(weight)
        return cls(Whole(values), scale, 1, weight.shape[1])

    def get_shape(self) -> list[int]:
        return list(self.values.get_shape())

    def get_dtype(self) -> str:
        return "F32"

    def header(self) -> Self:
        return self

    def __getitem__(self, index: Index) -> Tensor:
        part = torch.as_tensor(self.values[index]).to(self.scale.device)
        return part.float() * self.scales(index, 1, 1)

    def scales(self, index: Index, rows: int, columns: int) -> Tensor:
        """The scales of a part, one for so many of its rows and columns: where each of these cells begins."""
        by_row, by_column = ((*index, slice(None)) if isinstance(index, tuple) else (index, slice(None)))[:2]
        outputs, inputs = self.get_shape()
        row = torch.arange(outputs)[by_row][::rows] // self.rows
        column = torch.arange(inputs)[by_column][::columns] // self.columns
        return self.scale[row][:, column]


@dataclass(frozen=True)
class ScalesOf:
    """The scales of a weight, read by the same index as the weight."""

    weight: Fp8Weight
    rows: int
    columns: int

    def get_shape(self) -> list[int]:
        return self.weight.get_shape()

    def __getitem__(self, index: Index) -> Tensor:
        return self.weight.scales(index, self.rows, self.columns)


# --- layers that stay in FP8 ------------------------------------------------------------------------------------------


def fp8_transformer(
    c: ModelConfig, max_model_len: int, group: Group | None, device: torch.device,
    block: tuple[int, int] | None, is_fp8: Callable[[str], bool],
) -> Transformer:  # fmt: skip
    """`Transformer` on `device`, with `Fp8Linear` for each linear layer of which all weights are in FP8.

    is_fp8: whether the weight of this name is, by the names of checkpoints. The weights of no layer are ever on the
    device in 16 bits: such a model may be too large for it. (Layers hold parameters alone, so none is lost on "meta".)
    """
    with device:
        model = Transformer(replace(c, num_hidden_layers=0), max_model_len, group)
    with torch.device("meta"):
        layers = Transformer(c, 1, group).layers
    linears = {path: module for path, module in layers.named_modules() if isinstance(module, Linear)}
    stay = {
        path: layer
        for path, layer in linears.items()
        if can_stay(layer) and all(is_fp8(f"model.layers.{name}.weight") for name in names_of(path, layer))
    }
    for path, layer in stay.items():
        parent, _, name = path.rpartition(".")
        fp8 = Fp8MergedLinear(layer, block) if isinstance(layer, MergedLinear) else Fp8Linear(layer, block)
        setattr(layers.get_submodule(parent), name, fp8)
    others = "the others" if c.moe is None else "the others and all experts"
    logger.info("%d of %d linear layers stay in FP8, %s are in %s", len(stay), len(linears), others, c.dtype)
    model.layers, model.config = layers.to_empty(device=device), c
    return model


def names_of(path: str, layer: Linear) -> Iterator[str]:
    """What checkpoints call a layer, or its parts."""
    if not isinstance(layer, MergedLinear):
        yield path
        return
    for name in layer.parts:
        yield f"{path.rpartition('.')[0]}.{name}"


def is_projection(name: str) -> bool:
    """Whether a weight is one of those that are quantised here: neither head nor embedding, norm or router."""
    return name.endswith("_proj.weight")


# --- weights with their scales ----------------------------------------------------------------------------------------


def with_scales(found: dict[str, Any], said: Fp8Format, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    """`found` (name to `loader.Stored`) with an `Fp8Weight` for each weight in FP8 and its scales; and what is wrong
    with scales. device: of the model."""
    found, complaints = dict(found), list[str]()
    in_fp8 = [name for name, stored in found.items() if is_fp8_matrix(name, stored.header())]
    for name in in_fp8:
        values, place = found[name].header(), name.removesuffix("weight") + said.scale
        outputs, inputs = values.get_shape()
        rows, columns = said.block or (1, inputs)
        if (stored := found.pop(place, None)) is None:
            complaints.append(f"missing: {place}, the scales of {name}")
            continue
        shape, header = [-(-outputs // rows), -(-inputs // columns)], stored.header()
        if header.get_shape() != shape:
            complaints.append(f"wrong shape: {place} is {header.get_shape()}, not {shape}")
        elif header.get_dtype() not in FLOATS:
            complaints.append(f"wrong dtype: {place} is {header.get_dtype()}")
        else:
            found[name] = Fp8Weight(values, stored.tensor().to(device).float(), rows, columns)
    return found, complaints


def is_fp8_matrix(name: str, header: Any) -> bool:
    return name.endswith(".weight") and header.get_dtype() == FP8_DTYPE and len(header.get_shape()) == 2


def fill(views: dict[str, Tensor], name: str, weight: Fp8Weight, read: Callable[[Any], Tensor]) -> None:
    """Copy a weight, or the part of it that `read` gives, to its place. If that is in FP8, the scales as well."""
    place = views[name]
    if place.dtype != FP8:
        place.copy_(read(weight))
        return
    scales = views[name.removesuffix("weight") + "scale"]
    rows, columns = (whole // parts for whole, parts in zip(place.shape, scales.shape, strict=True))
    place.copy_(read(weight.values))
    scales.copy_(read(ScalesOf(weight, rows, columns)))
