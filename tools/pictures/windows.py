"""Pictures of sliding windows: who sees what, memory in use, what is lost, how far back a layer reaches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from stages.core import Event, SamplingParams
from stages.electives.windows import WindowEngine, see
from tools.pictures.blocks import draw_block_map
from tools.pictures.colours import BLACK, BLUE, ORANGE
from tools.pictures.plots import HATCHED, Picture, colour_of, legend_below, new_panels, new_picture
from tools.pictures.timeline import read_events

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


def save_windows(model: str, directory: Path, windows: Sequence[int]) -> str:
    """Save a copy of a Qwen3 checkpoint with these windows in its config.json, all equal or 0. Returns its path."""
    target = shutil.copytree(model, directory / "windows")
    raw = json.loads((target / "config.json").read_text(encoding="utf-8"))
    raw |= {"use_sliding_window": True, "sliding_window": max(windows)}
    raw["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    (target / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return str(target)


# --- what is measured -------------------------------------------------------------------------------------------------


def memory_in_use(events: Sequence[Event], engine: WindowEngine) -> list[int]:
    """For each step, the bytes of keys and values in all blocks that are held while it runs."""
    sizes: dict[int, int] = {}  # block -> bytes
    for pool in engine.pool.pools:
        cache = engine.caches[pool.window]
        size = 2 * cache.k[:, 0].numel() * cache.k.element_size()
        sizes |= dict.fromkeys(range(pool.first, pool.first + pool.num_blocks), size)
    return [sum(sizes[block] for block in blocks.holders) for blocks in read_events(events).blocks]


@torch.inference_mode()
def layer_outputs(engine: WindowEngine, text: list[int]) -> Tensor:
    """The hidden states of a text: the embedding and what each layer makes of it, [layers + 1, T, H].

    The engine must be new, or it would find the text in its cache and compute less.
    """
    parts: list[list[Tensor]] = [[] for _ in range(len(engine.model.layers) + 1)]
    modules = [engine.model.embed_tokens, *engine.model.layers]
    hooks = [
        module.register_forward_hook(lambda _, inputs, output, kept=kept: kept.append(output))
        for module, kept in zip(modules, parts, strict=True)
    ]
    engine.generate([text], ONE_TOKEN)
    for hook in hooks:
        hook.remove()
    return torch.stack([torch.cat(part) for part in parts])


@torch.inference_mode()
def losses(model: str, windows: Sequence[int], texts: Iterable[list[int]], first: int = 0) -> float:
    """The loss of a model with these windows on texts, in nats per token, from token `first` of each on."""
    total, count = 0.0, 0
    for text in texts:
        engine = WindowEngine(model, windows=windows, num_blocks=64)
        logits = engine.model.logits(engine.model.norm(layer_outputs(engine, text)[-1]))
        total += F.cross_entropy(logits[first:-1], torch.tensor(text[first + 1 :]), reduction="sum").item()
        count += len(text) - first - 1
    return total / count


def spread(model: str, windows: Sequence[int], text: list[int], changed: int, token: int) -> Tensor:
    """How much each hidden state changes when token `changed` of a text becomes `token`, as a share of its size.

    [layers + 1, T]: the first row is the embedding. Exactly 0 is where nothing of the token arrives.
    """
    other = [*text[:changed], token, *text[changed + 1 :]]
    before, after = (layer_outputs(WindowEngine(model, windows=windows), t) for t in (text, other))
    return (after - before).norm(dim=-1) / before.norm(dim=-1)


# --- pictures ---------------------------------------------------------------------------------------------------------


def mask_picture(length: int, windows: Sequence[int], block_size: int) -> Picture:
    """Which keys each query sees, a panel for each window. Hatched: blocks that the last query does not see."""
    picture, panels = new_panels(0.6 + 2.2 * len(windows), "Who sees what", len(windows))
    positions = torch.arange(length)
    for axes, window in zip(panels, windows, strict=True):
        mask = see(positions[:, None], positions, window)
        for query, row in enumerate(mask.tolist()):
            for key, visible in enumerate(row):
                if visible:
                    box = Rectangle((key, query), 1, 1, facecolor=ORANGE if key == query else BLUE, edgecolor="white")
                    axes.add_patch(box)
        oldest = int(mask[-1].int().argmax())
        for block in range(oldest // block_size):
            corner = (block * block_size, 0)
            axes.add_patch(Rectangle(corner, block_size, length, edgecolor="#909090", fill=False, hatch="////", lw=0))
        axes.vlines(range(0, length + 1, block_size), 0, length, color=BLACK, linewidth=0.8)
        axes.set(xlim=(0, length), ylim=(length, 0), ylabel="query")
        axes.set_yticks([n + 0.5 for n in range(0, length, 4)], [str(n) for n in range(0, length, 4)])
        axes.set_title(f"a window of {window}" if window else "no window", loc="right", fontsize=10)
    panels[-1].set_xticks([n + 0.5 for n in range(0, length, 4)], [str(n) for n in range(0, length, 4)])
    panels[-1].set_xlabel("key")
    handles = [Patch(color=ORANGE, label="its own key"), Patch(color=BLUE, label="an earlier key")]
    handles.append(Patch(edgecolor="#909090", label="blocks that can be given back", **HATCHED))
    legend_below(panels[-1], handles, columns=3)
    return picture


def pools_map(events: Sequence[Event], engine: WindowEngine, names: Sequence[str]) -> Picture:
    """Which request holds which block in which step, with a panel for the pool of each kind of layers."""
    timeline, pools = read_events(events), engine.pool.pools
    height = 1.7 + 0.15 * sum(pool.num_blocks for pool in pools)
    picture, panels = new_panels(height, "Which block holds what", len(pools), [pool.num_blocks for pool in pools])
    for axes, pool in zip(panels, pools, strict=True):
        draw_block_map(axes, timeline, pool.first + pool.num_blocks)
        axes.set_ylim(pool.first + pool.num_blocks - 0.4, pool.first - 0.6)
        kind, count = f"a window of {pool.window}" if pool.window else "no window", engine.windows.count(pool.window)
        axes.set_title(f"{count} layer{'s' * (count > 1)} with {kind}", loc="right", fontsize=10)
        axes.set_xlabel("")
    panels[-1].set_xlabel("step")
    handles = [Patch(facecolor=colour_of(i), label=f"request {name}") for i, name in enumerate(names)]
    handles.append(Patch(facecolor="#808080", hatch="////", edgecolor="white", label="shared by several"))
    legend_below(panels[-1], handles, columns=4)
    return picture


def spread_picture(changes: Tensor, changed: int, title: str) -> Picture:
    """How far a changed token reaches: a row for each layer, a box for each position. White: nothing has arrived."""
    picture, axes = new_picture(3.2, title)
    shown = changes.clamp(min=1e-6).log10().masked_fill(changes == 0, torch.nan)
    image = axes.imshow(shown.numpy(), cmap="Blues", vmin=-8, vmax=0, aspect="auto", interpolation="nearest")
    axes.axvline(changed, color=ORANGE, linewidth=1.5, linestyle=":")
    axes.set(xlabel="position", ylabel="layers above the embedding", yticks=range(len(changes)))
    picture.colorbar(image, ax=axes, label="change (log10)")
    return picture
