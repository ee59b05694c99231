"""Weights in FP8 on their way from a checkpoint into a model: they stay in FP8, or are widened.

A rank reads its share of a weight, and the scales of that share. A share may begin anywhere in a block, so the scale of
a row and a column is looked up by the block in which they lie.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from nanovllm.distributed.group import Group
from nanovllm.kernels import FP8
from nanovllm.layers.experts import Experts, Fp8Experts
from nanovllm.layers.fp8_linear import Fp8Linear, Fp8MergedLinear, can_stay, quantise
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
    """A weight [out, in] in FP8 with its scales, or the weights of all experts [E, out, in]. An index reads a part,
    widened to float32, on the device of the scales. The interface is that of a slice of safetensors (`get_slice`).

    values: the stored values, with the same interface. scale: [ceil(out / rows), ceil(in / columns)] float32, or one
    such matrix for each expert. rows, columns: how many of each share a scale.
    """

    values: Any
    scale: Tensor
    rows: int
    columns: int

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Quantise a weight, with a scale per output channel."""
        values, scale = quantise(weight)
        return cls(Whole(values), scale, 1, weight.shape[-1])

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
        """The scales of a part of the weight, which is cut into cells of `rows` x `columns`: for each cell the scale of
        the block in which it begins."""
        given, shape = index if isinstance(index, tuple) else (index,), self.get_shape()
        *experts, by_row, by_column = (*given, *[slice(None)] * (len(shape) - len(given)))
        row = torch.arange(shape[-2])[by_row][::rows] // self.rows
        column = torch.arange(shape[-1])[by_column][::columns] // self.columns
        return self.scale[tuple(experts)][..., row, :][..., column]


@dataclass(frozen=True)
class ScalesOf:
    """The scales of a weight, in cells of `rows` x `columns`, read by the same index as the weight."""

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
    """`Transformer` on `device`, with an `Fp8Linear` for each linear layer that can stay in FP8, and `Fp8Experts` for
    experts that can. No weight is filled.

    block: as in `Fp8Format`. is_fp8: whether the weight of this name (as checkpoints have it) is in FP8.

    The device never holds such a layer in 16 bits: the model may be too large for that. So layers are first made on
    "meta", where nothing is lost, because they hold parameters alone.
    """
    with device:
        model = Transformer(replace(c, num_hidden_layers=0), max_model_len, group)
    with torch.device("meta"):
        whole = Transformer(c, 1, group)
    layers = whole.layers
    linears = {path: module for path, module in layers.named_modules() if isinstance(module, Linear)}
    experts = {path: module for path, module in layers.named_modules() if isinstance(module, Experts)}
    stay: dict[str, nn.Module] = {}
    for path, layer in linears.items():
        if can_stay(layer) and all(is_fp8(f"model.layers.{name}.weight") for name in names_of(path, layer)):
            stay[path] = Fp8MergedLinear(layer, block) if isinstance(layer, MergedLinear) else Fp8Linear(layer, block)
    num_linears = len(stay)
    for path, of_layer in experts.items():
        names = (f"model.layers.{path}.{name}" for name, _ in of_layer.checkpoint_views())
        if of_layer.can_stay() and all(map(is_fp8, names)):
            stay[path] = Fp8Experts(of_layer, block)
    for path, fp8 in stay.items():
        parent, _, name = path.rpartition(".")
        setattr(layers.get_submodule(parent), name, fp8)
    of_experts = f", and the experts of {len(stay) - num_linears} of {len(experts)} layers," if experts else ""
    logger.info(
        "%d of %d linear layers%s stay in FP8, the others are in %s", num_linears, len(linears), of_experts, c.dtype
    )
    model.layers, model.config, model.kv_scales = layers.to_empty(device=device), c, whole.kv_scales
    return model


def names_of(path: str, layer: Linear) -> Iterator[str]:
    """The names that checkpoints have for a layer, or for the parts of a merged one."""
    if not isinstance(layer, MergedLinear):
        yield path
        return
    for name in layer.parts:
        yield f"{path.rpartition('.')[0]}.{name}"


def is_projection(name: str) -> bool:
    """Whether `quantization="fp8"` quantises a weight: it is not of the head, the embedding, a norm or a router.

    If all experts of a layer are in one tensor, its name does not end with ".weight"."""
    return name.removesuffix(".weight").endswith("_proj")


# --- weights with their scales ----------------------------------------------------------------------------------------


def with_scales(found: dict[str, Any], said: Fp8Format, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    """`found` (name to `loader.Stored`), where an `Fp8Weight` takes the place of each weight in FP8 and its scales; and
    complaints about scales. device: of the model."""
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
    """Copy the part of a weight that `read` gives to its place in `views`; if that is in FP8, copy the scales too."""
    place = views[name]
    if place.dtype != FP8:
        place.copy_(read(weight))
        return
    is_one_tensor = not name.endswith(".weight")  # of all experts
    scales = views[f"{name}_scale" if is_one_tensor else name.removesuffix("weight") + "scale"]
    rows, columns = (whole // parts for whole, parts in zip(place.shape[-2:], scales.shape[-2:], strict=True))
    place.copy_(read(weight.values))
    scales.copy_(read(ScalesOf(weight, rows, columns)))
