"""What eight bits lose and gain: numbers on a line, losses of quantised models, outliers, bytes that a step reads."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stages.core import SamplingParams
from stages.core import Sequence as Request
from stages.electives.fp8 import (
    Block,
    FP8Linear,
    Scales,
    block_of,
    e4m3_values,
    in_blocks,
    out_of_blocks,
    quantize,
    to_e4m3,
    widen,
)
from stages.model import ModelConfig, Transformer
from stages.stage_3_paged_blocks import make_batch
from tools.pictures.colours import BLACK, BLUE, ORANGE
from tools.pictures.plots import Picture, legend_below, new_panels, new_picture

KINDS: tuple[Scales, ...] = ("tensor", "channel", "block")
LARGEST_INT8 = 127

# --- weights ----------------------------------------------------------------------------------------------------------


def linears(model: Transformer) -> Iterator[tuple[str, Any]]:
    """The linear layers within the layers of a model, quantised or not, with their names."""
    for name, module in model.layers.named_modules(prefix="layers"):
        if isinstance(module, nn.Linear | FP8Linear):
            yield name, module


def through_fp8(weight: Tensor, block: Block) -> Tensor:
    return widen(*quantize(weight, block), block)


def through_int8(weight: Tensor, block: Block) -> Tensor:
    """A weight rounded to 255 integers: steps of one size, and a scale that makes the largest magnitude 127."""
    blocks = in_blocks(weight, block)
    step = blocks.abs().amax(dim=(1, 3), keepdim=True) / LARGEST_INT8
    return out_of_blocks((blocks / step).round() * step, weight.shape)


def weight_errors(model: Transformer) -> dict[str, tuple[float, float]]:
    """RMS error of e4m3 and int8 by kind of scale, as a share of the weights' own RMS. "none": without a scale, e4m3
    alone."""
    weights = [linear.weight for _, linear in linears(model)]
    size = sum(w.square().sum() for w in weights)

    def share(rounded: Iterable[Tensor]) -> float:
        lost = sum((r - w).square().sum() for r, w in zip(rounded, weights, strict=True))
        return float((lost / size).sqrt())

    found = {"none": (share(to_e4m3(w).float() for w in weights), float("nan"))}
    for kind in KINDS:
        blocks = [block_of(kind, w) for w in weights]
        pairs = list(zip(weights, blocks, strict=True))
        found[kind] = share(through_fp8(w, b) for w, b in pairs), share(through_int8(w, b) for w, b in pairs)
    return found


def activation_errors(engine: Any, texts: Iterable[list[int]]) -> dict[str, tuple[float, float, float]]:
    """For each kind of linear layer, of its inputs: how many times larger than a token's RMS its largest magnitude is,
    and the RMS errors of e4m3 and int8 with a scale per token. All are medians over layers and tokens."""
    found: dict[str, list[Tensor]] = {}

    def hear(_: nn.Module, inputs: tuple[Tensor], kind: str) -> None:
        x, block = inputs[0], (1, inputs[0].shape[1])
        size = x.square().mean(dim=1).sqrt()
        kept = [through_fp8(x, block), through_int8(x, block)]
        shares = [x.abs().amax(dim=1) / size, *((k - x).square().mean(dim=1).sqrt() / size for k in kept)]
        found.setdefault(kind, []).append(torch.stack(shares, dim=1))  # [T, 3]

    hooks = [
        linear.register_forward_pre_hook(partial(hear, kind=name.split(".")[-1]))
        for name, linear in linears(engine.model)
    ]
    for text in texts:
        read(engine, text)
    for hook in hooks:
        hook.remove()
    medians = {kind: torch.cat(shares).median(dim=0).values.tolist() for kind, shares in found.items()}
    return {kind: (largest, e4m3, int8) for kind, (largest, e4m3, int8) in medians.items()}


def use_int8(engine: Any, kind: Scales) -> Any:
    """The same engine with its weights rounded to int8, stored in full precision."""
    for _, linear in linears(engine.model):
        linear.weight.data = through_int8(linear.weight, block_of(kind, linear.weight))
    return engine


def save_widened(engine: Any, model: str, directory: Path) -> str:
    """Save a checkpoint in float32 that has the rounded weights of an engine in FP8. Returns its path."""
    shutil.copytree(model, directory, dirs_exist_ok=True)
    tensors = {name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items()}
    for name, linear in linears(engine.model):
        tensors[f"model.{name}.weight"] = widen(linear.weight, linear.weight_scale, linear.block).contiguous()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return str(directory)


def plant_outlier(model: str, directory: Path, factor: float, where: Literal["row", "column"]) -> str:
    """Save a copy of a checkpoint with an outlier in every layer, which computes the same. Returns its path.

    "row": an output channel of `up_proj` is larger by `factor`, and the column of `down_proj` that reads it smaller.
    "column": an input channel of the projections before attention is larger, and the norm's weight for it smaller. With
    a power of two all this is exact.
    """
    target = directory / f"{where}-{factor:g}"
    shutil.copytree(model, target)
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        kind = name.split(".")[-2]
        if where == "row" and kind == "up_proj":
            tensor[0] *= factor
        elif where == "row" and kind == "down_proj":
            tensor[:, 0] /= factor
        elif where == "column" and kind in ("q_proj", "k_proj", "v_proj"):
            tensor[:, 0] *= factor
        elif where == "column" and kind == "input_layernorm":
            tensor[0] /= factor
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return str(target)


# --- what is lost -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """What a model makes of texts that it reads, beside the model of full precision."""

    loss: float  # nats per token
    error: float  # RMS of the logits' differences, as a share of the logits' standard deviation
    same: float  # share of positions at which both have the same token as the most likely one


@torch.inference_mode()
def read(engine: Any, text: list[int]) -> Tensor:
    """The logits after each token of a text, which goes through the engine's blocks and leaves none behind: [T, V].

    Raises ValueError for a text that does not fit into them.
    """
    seq = Request(0, text, len(text), SamplingParams(temperature=0, max_tokens=1), seed=0)
    engine.pool.check_fits(seq)
    engine.pool.allocate(seq, len(text))
    try:
        batch = make_batch([(seq, len(text))], engine.pool.block_size, engine.device, engine.attention)
        hidden = engine.model(batch.input_ids, batch.positions, partial(engine.cache.attend, batch))
        logits: Tensor = engine.model.logits(hidden)
    finally:
        engine.pool.release(seq)
    return logits


@torch.inference_mode()
def judge(exact: Any, engines: Mapping[str, Any], texts: Iterable[list[int]]) -> dict[str, Judged]:
    """What each engine makes of `texts`, each judged beside `exact`, the engine of full precision."""
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in engines}
    spread, positions, predicted = 0.0, 0, 0
    for text in texts:
        truth, labels = read(exact, text), torch.tensor(text[1:])
        spread += truth.var(dim=-1).sum().item()
        positions, predicted = positions + len(text), predicted + len(labels)
        for name, engine in engines.items():
            logits = truth if engine is exact else read(engine, text)
            loss = F.cross_entropy(logits[:-1], labels, reduction="sum")
            error = (logits - truth).square().mean(dim=-1).sum()
            sums[name] += torch.stack([loss, error, (logits.argmax(-1) == truth.argmax(-1)).sum()])
    return {
        name: Judged(loss / predicted, (error / spread) ** 0.5, same / positions)
        for name, (loss, error, same) in ((name, found.tolist()) for name, found in sums.items())
    }


# --- what is gained ---------------------------------------------------------------------------------------------------


def stored_bytes(model: Transformer) -> int:
    """Bytes that a decode step reads of a model: all but the rows of an embedding that is not the head as well."""
    embedding = None if model.config.tie_word_embeddings else model.embed_tokens.weight
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors if t is not embedding)


def step_bytes(c: ModelConfig, sequences: int, context: int, *, weight: float = 2, kv: float = 2) -> float:
    """Bytes that a decode step reads of a model with these numbers: of linear layers within the layers `weight` bytes
    per weight, of the head two, and of each number in the cache of `sequences` texts of `context` tokens `kv`."""
    with torch.device("meta"):
        model = Transformer(c)
    in_layers = sum(linear.weight.numel() for _, linear in linears(model))
    cached = sequences * context * c.num_hidden_layers * 2 * c.num_key_value_heads * c.head_dim
    return in_layers * weight + c.vocab_size * c.hidden_size * 2 + cached * kv


# --- pictures ---------------------------------------------------------------------------------------------------------


def numbers_picture(weights: Tensor, title: str) -> Picture:
    """All numbers of e4m3 on a line, above a histogram of weights that a scale has brought into their range."""
    picture, (line, below) = new_panels(3.6, title, 2, heights=[1, 3])
    numbers = e4m3_values().nan_to_num(0)
    line.vlines(numbers.tolist(), 0, 1, color=BLUE, linewidth=0.8)
    line.set(yticks=[], ylim=(0, 1), ylabel="e4m3")
    below.hist(weights.flatten().tolist(), bins=112, color=ORANGE)
    below.set(xlabel="value", ylabel="weights", xlim=(-460, 460), yscale="log")
    handles = [
        Patch(color=BLUE, label="a number of e4m3"),
        Patch(color=ORANGE, label="weights, divided by their scale"),
    ]
    legend_below(below, handles)
    return picture


def octaves_picture(groups: Mapping[str, Tensor], title: str) -> Picture:
    """How many numbers e4m3 has from each power of two to the next, and where values lie: a panel for each group."""
    picture, panels = new_panels(1.5 + 1.35 * len(groups), title, 1 + len(groups))
    numbers = e4m3_values()[1:127]
    edges = list(range(-16, 11))
    for axes, values in zip(panels, [numbers, *groups.values()], strict=True):
        shown = values.abs().flatten().log2().clamp(edges[0], edges[-1] - 1e-3)
        share = torch.histc(shown, len(edges) - 1, edges[0], edges[-1]) * (1 if values is numbers else 100 / len(shown))
        colour = BLUE if values is numbers else ORANGE
        axes.bar([edge + 0.5 for edge in edges[:-1]], share.tolist(), 0.9, color=colour)
        axes.axvline(numbers[0].log2().item(), color=BLACK, linewidth=1, linestyle=":")
        axes.axvline(numbers[-1].log2().item(), color=BLACK, linewidth=1, linestyle=":")
        axes.set(ylabel="numbers" if values is numbers else "share [%]")
    for axes, name in zip(panels, ["positive numbers of e4m3", *groups], strict=True):
        axes.set_title(name, fontsize=10, loc="right")
    panels[-1].set(xlabel="magnitude: from 2 to this power, to the next", xlim=(edges[0], edges[-1]))
    panels[-1].set_xticks(edges[::2])
    limits = Line2D(
        [], [], color=BLACK, linewidth=1, linestyle=":", label="the smallest and the largest number of e4m3"
    )
    legend_below(panels[-1], [limits])
    return picture


def scales_picture(weight: Tensor, kinds: Sequence[Scales], title: str) -> Picture:
    """Which parts of a weight [out, in] share a scale, and how large it is: a panel for each kind."""
    picture, first = new_picture(3.0, title)
    first.remove()
    panels = picture.subplots(1, len(kinds), sharey=True)
    scales = {kind: quantize(weight, block_of(kind, weight)) for kind in kinds}
    largest = max(scale.max().item() for _, scale in scales.values())
    for axes, (kind, (_, scale)) in zip(panels, scales.items(), strict=True):
        rows, columns = block_of(kind, weight)
        shown = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
        image = axes.imshow(shown.numpy(), cmap="Blues", vmin=0, vmax=largest, aspect="auto", interpolation="nearest")
        axes.set(xlabel="input channel")
        axes.set_title(f"{kind}: {scale.numel():,} scale{'s' * (scale.numel() > 1)}", fontsize=10)
    panels[0].set_ylabel("output channel")
    picture.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    picture.colorbar(image, ax=list(panels), label="scale")
    return picture
