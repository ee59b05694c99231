"""A checkpoint becomes a model, strict about every tensor.

A loader that skips what it does not understand gives a model that runs and talks nonsense. This loader first compares
names, shapes and dtypes, from the files' headers, and names everything that does not fit in one error. Then each tensor
is read and copied straight to the parameter, or the slice of one, where it belongs. Beside the model no more than one
tensor is in memory.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanovllm.distributed.group import Group
from nanovllm.kernels import FP8, has_bfloat16, has_fp8
from nanovllm.layers.experts import Experts
from nanovllm.layers.linear import MergedLinear
from nanovllm.layers.norm import OffsetRMSNorm
from nanovllm.models.checkpoint import find_checkpoint, read_eos_token_ids, read_json, weight_files
from nanovllm.models.config import ModelConfig, read_config
from nanovllm.models.fp8_weights import (
    FLOATS,
    Fp8Weight,
    fill,
    fp8_transformer,
    is_fp8_matrix,
    is_projection,
    with_scales,
)
from nanovllm.models.kv_scales import take_kv_scales
from nanovllm.models.quantization import PER_CHANNEL
from nanovllm.models.sharding import is_elsewhere, read_shard, shard_config, with_expert_parallel
from nanovllm.models.transformer import Transformer
from nanovllm.models.window_config import within
from nanovllm.startup import part_of_start

logger = logging.getLogger(__name__)

PREFIX, HEAD, EMBEDDING = "model.", "lm_head.weight", "model.embed_tokens.weight"
ROWS = 4096  # of head and embedding that are compared at a time
Files = dict[str, set[str] | None]  # see `weight_files`
DUMMY_STD = 0.02
MOST_LISTED = 100  # things that are wrong with a checkpoint, of each kind
MIXTRAL_NAMES = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
TEXT_PART = re.compile(r"(model\.)?language_model\.(model\.)?")  # of a model that also reads images
IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.")  # its other parts, which are left out


@dataclass(frozen=True)
class LoadedModel:
    model: Transformer
    config: ModelConfig  # of the whole model; `dtype` is that in use, which may differ from the checkpoint's
    eos_token_ids: frozenset[int]
    path: Path


@part_of_start("weights")
def load_model(
    model: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    max_model_len: int | None = None,
    load_format: Literal["auto", "dummy"] = "auto",
    quantization: Literal["fp8"] | None = None,
    expert_parallel: bool = False,
    group: Group | None = None,
) -> LoadedModel:
    """Load a directory or a hub id onto `device`, ready for inference.

    dtype:          None: the checkpoint's on a GPU, and float32 on a CPU, where half precision is slow. A GPU without
                    bfloat16 (before Ampere) uses such a checkpoint in float16, or Gemma's in float32.
    max_model_len:  positions to prepare for; None: all that the model has.
    load_format:    "dummy" reads config.json alone and draws the weights at random, always the same ones.
    quantization:   "fp8" quantises the weights of linear layers and experts by output channel, except head and
                    routers. Weights that the checkpoint has in FP8 stay so. If `device` cannot read FP8, they are
                    widened to `dtype`.
    expert_parallel: whether each rank has whole experts, and not a part of every expert.
    group:          of several ranks each loads its own share, and reads nothing else. Only a weight that is quantised
                    here is read whole, since a scale belongs to a whole row.

    Raises ValueError naming what is wrong with the path, the configuration, the weights or the device.
    """
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r}: no usable CUDA GPU here; use device='cpu'")
    path = find_checkpoint(model, weights=load_format != "dummy")
    config = read_config(path)
    if code := read_json(path / "config.json").get("auto_map"):
        logger.warning("%s: config.json names code of its own (auto_map: %s), which is never run", path, code)
    dtype = dtype_in_use(dtype, config.dtype, device, exceeds_float16=config.gemma is not None)
    max_model_len = max_model_len or config.max_position_embeddings
    config = replace(config, dtype=dtype, windows=within(config.windows, max_model_len))
    files = {} if load_format == "dummy" else weight_files(path)
    if config.tie_word_embeddings and has_own_head(path, files, dtype):
        logger.warning(
            "%s: tie_word_embeddings is true, but lm_head.weight differs from the embedding; it is used", path
        )
        config = replace(config, tie_word_embeddings=False)
    config = with_expert_parallel(config) if expert_parallel else config
    share = config if group is None else shard_config(config, group.size)
    if config.quantization is None and quantization is None:
        with device:
            transformer = Transformer(share, max_model_len, group)
    else:
        transformer = quantised_transformer(share, max_model_len, group, device, path, files)
    if load_format == "dummy":
        fill_at_random(transformer)
    else:
        quantise = quantization is not None and config.quantization is None
        fill_from_files(transformer, path, files, config, group, quantise=quantise)
    return LoadedModel(transformer.eval(), config, read_eos_token_ids(path), path)


def dtype_in_use(
    asked: torch.dtype | None, stored: torch.dtype, device: torch.device, *, exceeds_float16: bool = False
) -> torch.dtype:
    """The dtype of the weights on `device`: what is asked for, or what `load_model` says of None.

    exceeds_float16: whether activations do, as Gemma 3's: they are infinite in float16.

    Raises ValueError if bfloat16 is asked for and the GPU has none, or float16 and activations exceed it.
    """
    narrow = torch.float32 if exceeds_float16 else torch.float16  # in the place of bfloat16, where there is none
    if asked == torch.bfloat16 and not has_bfloat16(device):
        raise ValueError(
            f"dtype='bfloat16': {str(device)!r} has no bfloat16 (from compute capability 8.0); use {name_of(narrow)!r}"
        )
    if asked == torch.float16 and exceeds_float16:
        raise ValueError("dtype='float16': Gemma's activations exceed its range; use 'bfloat16' or 'float32'")
    if asked is not None:
        return asked
    if device.type == "cpu":
        return torch.float32
    if stored == torch.float16 and exceeds_float16:
        stored = torch.bfloat16
    if stored == torch.bfloat16 and not has_bfloat16(device):
        logger.info("%s has no bfloat16: the checkpoint's weights are used in %s", device, name_of(narrow))
        return narrow
    return stored


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def checkpoint_views(model: Transformer, *, experts_apart: bool) -> Iterator[tuple[str, Tensor]]:
    """The name of each tensor of the checkpoint, and the memory that it fills: a parameter, or some rows of one.

    experts_apart: whether every expert has tensors of its own, as in nearly all checkpoints.
    """
    for path, module in model.named_modules():
        if path != "lm_head":
            path = f"model.{path}"
        if isinstance(module, MergedLinear):  # checkpoints do not know its name: they have its parts in its place
            parent = path.rpartition(".")[0]
            yield from ((f"{parent}.{name}", view) for name, view in module.checkpoint_views())
        elif isinstance(module, Experts) and experts_apart:
            yield from ((f"{path}.{name}", view) for name, view in module.checkpoint_views())
        else:
            yield from module.named_parameters(path, recurse=False)


def quantised_transformer(
    share: ModelConfig, length: int, group: Group | None, device: torch.device, path: Path, files: Files
) -> Transformer:
    """`Transformer` for weights in FP8: those that `files` have so, or those quantised while they are loaded."""
    if not has_fp8(device):
        logger.info("%s cannot read weights in FP8: they are widened to %s on the way in", device, share.dtype)
        with device:
            return Transformer(share, length, group)
    said = share.quantization or PER_CHANNEL
    if not files or share.quantization is None:
        return fp8_transformer(share, length, group, device, said.block, is_projection)
    with ExitStack() as stack:
        found = open_tensors(stack, path, files)
        in_fp8 = {name for name, stored in found.items() if is_fp8_matrix(name, stored.header())}
    return fp8_transformer(share, length, group, device, said.block, in_fp8.__contains__)


def fill_from_files(
    model: Transformer, path: Path, files: Files, config: ModelConfig, group: Group | None = None,
    *, quantise: bool = False,
) -> None:  # fmt: skip
    """Copy every tensor of `files` (see `weight_files`), or a rank's share of it, to its place.

    quantise: whether to quantise linear layers and experts, of a checkpoint that is not quantised.

    Raises ValueError unless the tensors fit `config`, that of the whole model, exactly.
    """
    rank, ranks = (0, 1) if group is None else (group.rank, group.size)
    with ExitStack() as stack:
        held = open_tensors(stack, path, files)
        if config.tie_word_embeddings and EMBEDDING not in held and HEAD in held:
            held[EMBEDDING] = held.pop(HEAD)
        needed = {
            name: stored
            for name, stored in held.items()
            if not (is_redundant(name, config) or is_elsewhere(name, config, rank, ranks))
        }
        found: dict[str, Stored | Fp8Weight]
        found, kv_scales, complaints = take_kv_scales(needed, config.num_hidden_layers)
        if config.quantization is not None:
            found, more = with_scales(found, config.quantization, model.embed_tokens.weight.device)
            complaints += more
        experts_apart = not any(name.endswith(".experts.gate_up_proj") for name in found)
        views = dict(checkpoint_views(model, experts_apart=experts_apart))
        with torch.device("meta"):
            every = checkpoint_views(Transformer(config, 1), experts_apart=experts_apart)
        wanted = {name: view for name, view in every if not is_elsewhere(name, config, rank, ranks)}
        complaints = compare(wanted, found) + complaints
        if complaints:
            raise ValueError(f"the weights in {path} do not fit its config.json: {listed(complaints, '; ')}")
        with torch.no_grad():
            for name, stored in found.items():
                if quantise and isinstance(stored, Stored) and is_projection(name):
                    stored = Fp8Weight.of(stored.tensor().to(views[name].device))
                if isinstance(stored, Fp8Weight):
                    fill(views, name, stored, partial(read_shard, name, c=config, rank=rank, ranks=ranks))
                    continue
                whole = ranks == 1
                part = stored.tensor() if whole else read_shard(name, stored.header(), config, rank, ranks)
                views[name].copy_(part)
            model.kv_scales = kv_scales
            for module in model.modules():
                if isinstance(module, OffsetRMSNorm):
                    module.weight.add_(1)


class Stored(NamedTuple):
    """A tensor in an open file."""

    reader: Any
    name: str  # in the file

    def header(self) -> Any:
        return self.reader.get_slice(self.name)

    def tensor(self) -> Tensor:
        tensor: Tensor = self.reader.get_tensor(self.name)
        return tensor


def open_tensors(stack: ExitStack, path: Path, files: Files) -> dict[str, Stored]:
    """The name of every tensor of `files`, and where the tensor is. `stack` closes the files.

    A model that was saved without its head (`Qwen3Model`, and not `Qwen3ForCausalLM`) has names without "model.", which
    is put before them, as Hugging Face does. The experts of Mixtral have names of their own, which become Qwen's. Of a
    model that also reads images, only the text model is taken.
    """
    found: dict[str, Any] = {}
    for file, names in files.items():
        try:
            reader = stack.enter_context(safe_open(path / file, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path / file} is damaged or cut short ({error}); fetch it again") from error
        held = set(reader.keys())
        found.update(dict.fromkeys(held if names is None else held & names, reader))
    if any(map(TEXT_PART.match, found)):
        found = {name: found[name] for name in found if not name.removeprefix(PREFIX).startswith(IMAGE_PARTS)}
    alone = {name: TEXT_PART.sub("", name, count=1) for name in found}
    prefix = "" if any(name.startswith(PREFIX) for name in alone.values()) else PREFIX
    return {our_name(alone[name], prefix): Stored(reader, name) for name, reader in found.items()}


def our_name(name: str, prefix: str) -> str:
    if ".block_sparse_moe." in name:
        for theirs, ours in MIXTRAL_NAMES.items():
            name = name.replace(theirs, ours)
    return name if name == HEAD else prefix + name


def has_own_head(path: Path, files: Files, dtype: torch.dtype) -> bool:
    """Whether the files hold an output head that is not the embedding, as weights in `dtype`.

    Hugging Face ties the two only where they are equal. They are read a few rows at a time.
    """
    with ExitStack() as stack:
        found = open_tensors(stack, path, files)
        if not {HEAD, EMBEDDING} <= found.keys():
            return False
        head, embedding = found[HEAD].header(), found[EMBEDDING].header()
        if head.get_shape() != embedding.get_shape():
            return True
        starts = range(0, head.get_shape()[0], ROWS)
        parts = ([tensor[i : i + ROWS].to(dtype) for tensor in (head, embedding)] for i in starts)
        return not all(torch.equal(*pair) for pair in parts)


def is_redundant(name: str, config: ModelConfig) -> bool:
    """Whether a tensor follows from others, though some writers store it: a tied head, or the rotary frequencies."""
    tied_head = name == HEAD and config.tie_word_embeddings
    return tied_head or name.endswith(".rotary_emb.inv_freq")


def compare(wanted: dict[str, Tensor], found: Mapping[str, Stored | Fp8Weight]) -> list[str]:
    """What does not fit, by kind, told from the headers alone."""
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    misshapen, not_floats = [], []
    for name in sorted(wanted.keys() & found.keys()):
        header = found[name].header()
        if list(header.get_shape()) != list(wanted[name].shape):
            misshapen.append(f"{name} is {header.get_shape()}, not {list(wanted[name].shape)}")
        if header.get_dtype() not in FLOATS:
            not_floats.append(f"{name} is {header.get_dtype()}")
    kinds = {"missing": missing, "unexpected": unexpected, "wrong shape": misshapen, "wrong dtype": not_floats}
    complaints = [f"{kind}: {listed(names)}" for kind, names in kinds.items() if names]
    if HEAD in missing:
        remedy = "save the model with its head (...ForCausalLM), or, if its head is the embedding, with"
        complaints.append(f"{remedy} tie_word_embeddings: true")
    return complaints


def listed(names: list[str], separator: str = ", ") -> str:
    """The first of these, and how many more there are: with experts there may be thousands."""
    more = len(names) - MOST_LISTED
    return separator.join(names[:MOST_LISTED]) + (f" and {more:,} more" if more > 0 else "")


def fill_at_random(model: Transformer) -> None:
    """Fill the model with small seeded weights. For benchmarks: a step takes as long as with real ones."""
    device = model.embed_tokens.weight.device
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.fill_(1)
        elif name.endswith("scale"):
            parameter.data.fill_(DUMMY_STD)
        elif parameter.dtype == FP8:
            parameter.data.copy_(torch.empty_like(parameter, dtype=torch.float16).normal_(generator=generator))
        else:
            parameter.data.normal_(0, DUMMY_STD, generator=generator)
