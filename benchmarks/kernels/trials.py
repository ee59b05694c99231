"""What `tune` tries: for each section of the table, its contests over the shapes that matter."""

import json
from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import torch

from benchmarks.kernels.contest import Call, Choice, Contest, Point
from benchmarks.lib.harness import ROOT

MOE = ROOT / "benchmarks/shapes/Qwen3-30B-A3B/config.json"
# Pairs of an expert on average, at most; the numbers of tokens that stand for them, and the sizes of tiles that are
# tried. The borders are a factor of four apart: so the warm-up has a step between any two, whatever the model.
FEW_PAIRS: list[tuple[float, list[int], list[int]]] = [
    (1, [1, 4, 16], [16]),
    (4, [32, 64], [16, 32]),
    (16, [128, 256], [16, 32, 64]),
    (64, [512, 1024], [32, 64, 128]),
    (float("inf"), [2048, 8192], [64, 128]),
]
ROUTINGS = 8  # that take turns: with few tokens the weights of one could stay in the L2 cache


def expert_tiles(pairs: list[int], gated: bool, shared: int) -> list[Choice]:
    """Tiles of so many pairs that have room for two steps."""
    found = []
    halves = 2 if gated else 1
    for rows in pairs:
        small = rows < 64
        columns = (32, 64, 128) if small else (64, 128, 256)
        inner = (128, 256, 512) if rows == 16 else (128, 256)
        for c, b, warps, stages in product(columns, inner, (4, 8), (3, 4, 6) if rows == 16 else (3, 4)):
            step = (rows + halves * c) * b
            accumulators = rows * c * halves // (32 * warps)  # registers of a thread
            if stages < shared // step and accumulators <= 128:
                found.append(choice_of(pairs=rows, columns=c, inner_bytes=b, num_warps=warps, num_stages=stages))
    return found


def choice_of(**values: Any) -> Choice:
    return tuple(values.items())


def experts(device: torch.device) -> list[Contest]:
    """Both products of a layer, by themselves: the pairs of random routings, sorted beforehand."""
    from nanovllm.kernels.launch import shared_memory
    from nanovllm.kernels.moe.grouped_mlp import Tile, choose_tile, grouped_linear
    from nanovllm.kernels.moe.sort_pairs import sort_pairs

    config = json.loads(MOE.read_text())
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    num_experts, num_chosen = config["num_experts"], config["num_experts_per_tok"]
    new: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    gate_up = torch.empty(num_experts, 2 * inner, hidden, **new).normal_(std=0.02)
    down = torch.empty(num_experts, hidden, inner, **new).normal_(std=0.02)

    def point(num_tokens: int, gated: bool) -> Point:
        scores = torch.randn(ROUTINGS, num_tokens, num_experts, device=device).softmax(-1)
        routed = [score.topk(num_chosen) for score in scores]
        sorted_pairs = [(*sort_pairs(r.indices.contiguous(), num_experts), r.values.contiguous()) for r in routed]
        x = torch.randn((num_tokens, hidden) if gated else (num_tokens * num_chosen, inner), **new)

        def run(choice: Choice) -> Call:
            turns, tile = cycle(sorted_pairs), Tile(**dict(choice))
            weight = gate_up if gated else down
            return lambda: grouped_linear(x, weight, *next(turns), tile, gated=gated)

        return Point(f"{num_tokens} tokens", run, calls=ROUTINGS if num_tokens <= 1024 else 2)

    contests = []
    for gated in (True, False):
        least = 0.0
        for most, tokens, pairs in FEW_PAIRS:
            tile = choose_tile(device, tokens[-1], tokens[-1] * num_chosen, num_experts, gated)
            when = {"layer": "gated" if gated else "plain", "pairs": [least, most]}
            candidates = expert_tiles(pairs, gated, shared_memory(device))
            points = [point(n, gated) for n in tokens]
            contests.append(Contest("experts", when, points, candidates, choice_of(**tile._asdict())))
            least = most
    return contests


CONTESTS: dict[str, Callable[[torch.device], list[Contest]]] = {"experts": experts}
