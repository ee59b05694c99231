"""Pictures of a mixture of experts: whom the router prefers, who speaks which word, how much is read in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle
from torch import Tensor

from stages.core import SamplingParams
from tools.pictures.colours import BLACK, BLUE, GREEN, ORANGE, PINK, SKY, VERMILION, YELLOW
from tools.pictures.plots import Picture, legend_below, new_picture

EXPERT_COLOURS = (SKY, ORANGE, GREEN, YELLOW, PINK, VERMILION, "#B0B0B0", BLUE)
LINE = 78  # characters of a line of a coloured text

Step = dict[int, Tensor]  # layer -> what its router said of the tokens of a step: logits [T, E]


def hear_routers(engine: Any) -> list[Step]:
    """A list to which every later step of `engine` adds what the routers say in it."""
    steps: list[Step] = []
    routers = {i: layer.mlp.gate for i, layer in enumerate(engine.model.layers) if hasattr(layer.mlp, "experts")}
    for layer, router in routers.items():

        def hear(module: Any, inputs: Any, logits: Tensor, layer: int = layer) -> None:
            if layer == min(routers):
                steps.append({})
            steps[-1][layer] = logits

        router.register_forward_hook(hear)
    return steps


def hear_texts(engine: Any, texts: Sequence[list[int]]) -> Step:
    """What the routers say of every token of `texts`, each of which is read as a prompt."""
    steps = hear_routers(engine)
    for text in texts:
        engine.generate([text], SamplingParams(temperature=0, max_tokens=1))
    return {layer: torch.cat([step[layer] for step in steps]) for layer in steps[0]}


def experts_read(steps: Iterable[Step], num_chosen: int) -> list[tuple[int, float]]:
    """Of each step its tokens, and how many experts have at least one of them, on average over the layers."""
    found = []
    for step in steps:
        distinct = [len(logits.topk(num_chosen).indices.unique()) for logits in step.values()]
        found.append((len(next(iter(step.values()))), sum(distinct) / len(distinct)))
    return found


def favourites(words: Sequence[str], experts: Sequence[int], num_experts: int, count: int = 7) -> list[list[str]]:
    """The words that each expert has most above its share, those first that account for most of its tokens.

    A word counts for an expert as often as the expert had it, beyond what it would have had by its share of all words.
    """
    all_words, mine = Counter(words), [Counter[str]() for _ in range(num_experts)]
    for word, expert in zip(words, experts, strict=True):
        mine[expert][word] += 1
    found = []
    for counts in mine:
        share = counts.total() / len(words)
        above = {word: n - share * all_words[word] for word, n in counts.items()}
        found.append([word for word in sorted(above, key=lambda w: (-above[w], w))[:count] if above[word] > 0])
    return found


def router_picture(words: Sequence[str], probabilities: Tensor, num_chosen: int, title: str) -> Picture:
    """What a router says of each word of a text: probabilities [T, E], a column a word; the chosen ones are framed."""
    num_experts = probabilities.shape[1]
    picture, axes = new_picture(1.5 + 0.27 * num_experts, title)
    image = axes.imshow(probabilities.T.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for column, chosen in enumerate(probabilities.topk(num_chosen).indices.tolist()):
        for expert in chosen:
            axes.add_patch(Rectangle((column - 0.46, expert - 0.42), 0.92, 0.84, fill=False, edgecolor=ORANGE, lw=2))
    axes.set_xticks(range(len(words)), [word.strip() or "␣" for word in words], rotation=60, ha="right", fontsize=9)
    axes.set(ylabel="expert", yticks=range(num_experts))
    axes.set_xlabel("token")
    axes.figure.colorbar(image, ax=axes, label="probability")
    return picture


def speakers(words: Sequence[str], experts: Sequence[int], title: str) -> Picture:
    """A text with each token in the colour, and over the number, of the expert that had the largest weight in it."""
    rows: list[list[tuple[int, str, int]]] = [[]]  # column, token, expert
    column = 0
    for word, expert in zip(words, experts, strict=True):
        shown = word.replace("\n", "¶")
        if column + len(shown) > LINE:
            rows.append([])
            column, shown = 0, shown.lstrip()
        rows[-1].append((column, shown, expert))
        column += len(shown)
    picture, axes = new_picture(0.9 + 0.42 * len(rows), title)
    for row, tokens in enumerate(rows):
        for column, shown, expert in tokens:
            at = column + len(shown) - len(shown.lstrip())
            width = len(shown.lstrip()) - 0.15
            colour = EXPERT_COLOURS[expert % len(EXPERT_COLOURS)]
            box = FancyBboxPatch((at, row - 0.32), width, 0.42, boxstyle="square,pad=0", color=colour, alpha=0.55, lw=0)
            axes.add_patch(box)
            axes.text(at, row, shown.lstrip(), family="monospace", fontsize=8.6, color=BLACK)
            axes.text(at + width / 2, row + 0.38, str(expert), fontsize=6.5, ha="center", color="#505050")
    axes.set(xlim=(0, LINE), ylim=(len(rows) - 0.4, -0.6))
    axes.set_axis_off()
    used = sorted(set(experts))
    handles = [Patch(color=EXPERT_COLOURS[e % len(EXPERT_COLOURS)], alpha=0.55, label=f"expert {e}") for e in used]
    legend_below(axes, handles, columns=4)
    return picture


def pieces(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text of each token by itself."""
    return [decode([token]) for token in tokens]
