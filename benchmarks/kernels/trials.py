"""What `tune` tries: for each section of the table of cards, its contests over the shapes that matter.

Borders between rows lie where the warm-up has a step on both sides (`UNRECORDED` in `runner/warm_up.py`), so that
no request waits for a compiler: at 4, 16, 32, 64, 128 and 256 tokens, and a factor of four apart for pairs of an
expert.
"""

import json
from collections.abc import Callable
from itertools import cycle, pairwise, product
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import linears
from benchmarks.kernels.attention import NUM_HEADS, NUM_KV_HEADS, Problem, decode_problems, prefill_problems
from benchmarks.kernels.contest import Call, Choice, Contest, Point
from benchmarks.lib.harness import ROOT

MOE = ROOT / "benchmarks/shapes/Qwen3-30B-A3B/config.json"
# Pairs of an expert on average, at most; the numbers of tokens that stand for them; and the tiles that are tried
PER_EXPERT: list[tuple[float, list[int], list[int]]] = [
    (1, [1, 4, 16], [16]),
    (4, [32, 64], [16, 32]),
    (16, [128, 256], [16, 32, 64]),
    (64, [512, 1024], [32, 64, 128]),
    (inf, [2048, 8192], [64, 128]),
]
ROUTINGS = 8  # that take turns: with few tokens the weights of one could stay in the L2 cache

LINEAR_SHAPES = [linears.SHAPES["0.6B"], (2048, 16, 8, 6144), linears.SHAPES["8B"], linears.SHAPES["8B on 4 ranks"]]
# The most tokens of a row, and where it is measured
TOKENS = {4: [1, 4], 16: [16], 32: [32], 64: [64], 128: [128], 256: [256]}
FP8_TOKENS = {16: [1, 16], 32: [32], 64: [64]}
TILES = [  # columns, inputs, stages, swapped
    (64, 256, 3, True), (64, 128, 4, True), (64, 128, 2, True),
    (64, 128, 4, False), (32, 256, 3, False), (32, 128, 4, False), (32, 128, 2, False),
]  # fmt: skip


def choice_of(**values: Any) -> Choice:
    return tuple(values.items())


def table(device: torch.device, section: str) -> list[Any]:
    """The rows for this card without the user's: what `tune` starts from."""
    from nanovllm.kernels.cards import rows_for
    from nanovllm.kernels.launch import capability

    return rows_for(capability(device))[section]


def dtype_of(device: torch.device) -> torch.dtype:
    from nanovllm.kernels import has_bfloat16

    return torch.bfloat16 if has_bfloat16(device) else torch.float16


# --- experts ----------------------------------------------------------------------------------------------------------


def expert_tiles(pairs: list[int], gated: bool, shared: int, itemsize: int) -> list[Choice]:
    """Tiles of so many pairs that fit. itemsize: bytes of a weight."""
    found = []
    for rows in pairs:
        columns = (32, 64, 128) if rows < 64 else (64, 128, 256)
        inner = (128, 256, 512) if rows == 16 else (128, 256)
        for c, b, warps, stages in product(columns, inner, (4, 8), (2, 3, 4, 6) if rows == 16 else (2, 3, 4)):
            products = c * (2 if gated else 1)
            most = shared // ((rows * 2 // itemsize + products) * b) - 1
            registers = rows * products // (32 * warps)  # of a thread, for sums
            if registers <= 128 and (2 < stages <= most or stages == most == 2):
                found.append(choice_of(pairs=rows, columns=c, inner_bytes=b, num_warps=warps, num_stages=stages))
    return found


def experts(device: torch.device) -> list[Contest]:
    """Both products of a layer, by themselves: the pairs of random routings, sorted beforehand. Where there is FP8 the
    same for weights in FP8, with a scale per channel and with a scale per block."""
    from nanovllm.kernels import has_fp8
    from nanovllm.kernels.cards import first_fit
    from nanovllm.kernels.launch import shared_memory
    from nanovllm.kernels.moe.grouped_mlp import Tile, grouped_linear
    from nanovllm.kernels.moe.sort_pairs import sort_pairs

    config = json.loads(MOE.read_text())
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    num_experts, num_chosen = config["num_experts"], config["num_experts_per_tok"]
    new: dict[str, Any] = {"dtype": dtype_of(device), "device": device}
    gate_up = torch.empty(num_experts, 2 * inner, hidden, **new).normal_(std=0.02)
    down = torch.empty(num_experts, hidden, inner, **new).normal_(std=0.02)

    def scaled(weight: Tensor, block: int | None) -> tuple[Tensor, Tensor | None]:
        if block is None:
            return weight, None
        rows, columns = (1, weight.shape[2]) if block == 1 else (block, block)
        shape = num_experts, weight.shape[1] // rows, weight.shape[2] // columns
        return weight.to(torch.float8_e4m3fn), torch.ones(shape, device=device)

    def point(num_tokens: int, gated: bool, block: int | None) -> Point:
        scores = torch.randn(ROUTINGS, num_tokens, num_experts, device=device).softmax(-1)
        routed = [score.topk(num_chosen) for score in scores]
        sorted_pairs = [(*sort_pairs(r.indices.contiguous(), num_experts), r.values.contiguous()) for r in routed]
        x = torch.randn((num_tokens, hidden) if gated else (num_tokens * num_chosen, inner), **new)
        weight, scale = scaled(gate_up if gated else down, block)

        def run(choice: Choice) -> Call:
            turns, tile = cycle(sorted_pairs), Tile(**dict(choice))
            return lambda: grouped_linear(x, weight, *next(turns), tile, gated=gated, scale=scale)

        name = f"{num_tokens} tokens" + ("" if block is None else " by block" if block > 1 else " by channel")
        return Point(name, run, calls=ROUTINGS if num_tokens <= 1024 else 2)

    contests = []
    for layer, itemsize in product(("gated", "plain"), (2, 1) if has_fp8(device) else (2,)):
        least = 0.0
        for most, tokens, pairs in PER_EXPERT:
            average = tokens[-1] * num_chosen / num_experts
            now = first_fit(table(device, "experts"), layer, tokens=tokens[-1], per_expert=average, itemsize=itemsize)
            candidates = expert_tiles(pairs, layer == "gated", shared_memory(device), itemsize)
            when = {"layer": layer, "itemsize": [itemsize, itemsize], "per_expert": [least, most]}
            blocks = (None,) if itemsize == 2 else (1, 128)
            points = [point(n, layer == "gated", block) for block in blocks for n in tokens]
            contests.append(Contest("experts", when, points, candidates, choice_of(**now)))
            least = most
    return contests


# --- linear layers ----------------------------------------------------------------------------------------------------


def linear_candidates(num_tokens: int, on_hopper: bool) -> list[Choice]:
    found = [choice_of(kernel="library")]
    if num_tokens <= 16:
        found.append(choice_of(kernel="skinny"))
    if num_tokens <= 128:
        names = "columns", "inner", "num_stages", "swapped"
        found += [choice_of(kernel="tiled", **dict(zip(names, tile, strict=True))) for tile in TILES]
    if on_hopper:
        found += [choice_of(kernel="weight_prefetch", most=most) for most in (16, 32, 64, 128) if most <= num_tokens]
        if num_tokens <= 4:
            found.append(choice_of(kernel="weight_prefetch", most=16, handful=True))
    return found


def linear(device: torch.device) -> list[Contest]:
    """Layers of several sizes. A border between two sizes is their geometric mean."""
    from nanovllm.kernels.cards import first_fit
    from nanovllm.kernels.launch import shared_memory
    from nanovllm.kernels.linear.choice import hopper_linear, kernel_of

    hopper = hopper_linear(device)
    layers = {}  # by kind, by whether the layer is narrow, and by elements: inputs and outputs of the weight
    for shape in LINEAR_SHAPES:
        for _, inputs, outputs, how in linears.layers_of(*shape):
            layers[next(iter(how), "plain"), shape[0] <= 2048, inputs * outputs] = inputs, outputs
    pool = torch.empty(2 * max(size for _, _, size in layers), dtype=dtype_of(device), device=device).normal_(std=0.03)

    def point(num_tokens: int, layer: str, inputs: int, outputs: int) -> Point:
        how = {} if layer == "plain" else {layer: True}
        weights = pool[: pool.numel() // (inputs * outputs) * inputs * outputs].view(-1, outputs, inputs)
        x = torch.randn(num_tokens, inputs, dtype=pool.dtype, device=device)
        columns = outputs // 2 if layer == "gated" else outputs

        def run(choice: Choice) -> Call:
            kernel = kernel_of(dict(choice), hopper, num_tokens, columns, inputs, **how) or linears.library(how)
            call, turns = linears.with_norm(kernel, x, outputs) if layer == "partial" else kernel, cycle(weights)
            return lambda: call(x, next(turns))

        return Point(f"{num_tokens} x {inputs} -> {outputs}", run, calls=len(weights))

    contests = []
    for layer, narrow in product(("plain", "gated", "partial"), (True, False)):
        sizes = sorted(size for kind, is_narrow, size in layers if (kind, is_narrow) == (layer, narrow))
        borders = [0, *(sqrt(a * b) * pool.itemsize // 1024 for a, b in pairwise(sizes)), inf]
        for size, kib in zip(sizes, pairwise(borders), strict=True):
            least = 1
            for most, tokens in TOKENS.items():
                numbers = {"tokens": most, "kib": size * pool.itemsize / 1024, "hidden": 2048 if narrow else 2049}
                numbers["shared_kib"] = shared_memory(device) / 1024
                without = None if hopper else "weight_prefetch"
                now = first_fit(table(device, "linear"), layer, without=without, **numbers)
                hidden = [1, 2048] if narrow else [2049, inf]
                when = {"layer": layer, "hidden": hidden, "kib": list(kib), "tokens": [least, most]}
                points = [point(n, layer, *layers[layer, narrow, size]) for n in tokens]
                candidates = linear_candidates(most, hopper is not None)
                contests.append(Contest("linear", when, points, candidates, choice_of(**now)))
                least = most + 1
    return contests


# --- linear layers with weights in FP8 --------------------------------------------------------------------------------


def fp8_candidates(layer: str) -> list[Choice]:
    programs = (128, 256, 512) if layer == "partial" else (256,)  # others are not cut along their inputs
    sizes = product((32, 64), (128, 256), (3, 5), (True, False), programs)
    return [choice_of(columns=c, inner=i, num_stages=s, swapped=w, programs=p) for c, i, s, w, p in sizes]


def fp8(device: torch.device) -> list[Contest]:
    """The layers of `LINEAR_SHAPES`, with scales of channels and of blocks. None on a card without FP8, or where these
    layers have no rows."""
    from nanovllm.kernels import has_fp8
    from nanovllm.kernels.cards import first_fit
    from nanovllm.kernels.fp8.widening_linear import Tile, widening_linear
    from nanovllm.kernels.linear.choice import hopper_linear

    if not has_fp8(device) or hopper_linear(device) is not None:
        return []
    layers = {}  # by kind and by elements: inputs and outputs of the weight
    for shape in LINEAR_SHAPES:
        for _, inputs, outputs, how in linears.layers_of(*shape):
            layers[next(iter(how), "plain"), inputs * outputs] = inputs, outputs
    size = 4 * max(size for _, size in layers)
    pool = torch.randint(0, 120, (size,), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)

    def point(num_tokens: int, layer: str, inputs: int, outputs: int, in_blocks: bool) -> Point:
        how: dict[str, Any] = {} if layer == "plain" else {layer: True}
        weights = pool[: size // (inputs * outputs) * inputs * outputs].view(-1, outputs, inputs)
        scale = torch.ones((outputs // 128, inputs // 128) if in_blocks else (outputs, 1), device=device)
        x = torch.randn(num_tokens, inputs, dtype=torch.bfloat16, device=device)

        def run(choice: Choice) -> Call:
            def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                return widening_linear(x, weight, scale, tile=Tile(**dict(choice)), **how)

            call, turns = linears.with_norm(multiply, x, outputs) if layer == "partial" else multiply, cycle(weights)
            return lambda: call(x, next(turns))

        scales = "blocks" if in_blocks else "channels"
        return Point(f"{num_tokens} x {inputs} -> {outputs} by {scales}", run, calls=len(weights))

    contests = []
    for layer in ("plain", "gated", "partial"):
        sizes = sorted(size for kind, size in layers if kind == layer)
        borders = [0, *(sqrt(a * b) // 1024 for a, b in pairwise(sizes)), inf]
        for size_of, kib in zip(sizes, pairwise(borders), strict=True):
            least = 1
            for most, tokens in FP8_TOKENS.items():
                now = first_fit(table(device, "fp8"), layer, tokens=most, kib=size_of / 1024)
                when = {"layer": layer, "kib": list(kib), "tokens": [least, most]}
                points = [point(n, layer, *layers[layer, size_of], b) for n in tokens for b in (False, True)]
                contests.append(Contest("fp8", when, points, fp8_candidates(layer), choice_of(**now)))
                least = most + 1
    return contests


# --- attention --------------------------------------------------------------------------------------------------------


def attention_point(problem: Problem, launch: Callable[[Choice, Problem], Callable[[Any], object]]) -> Point:
    """launch: makes of a choice what attends, given `PagedInputs`. Each call has another layer's cache."""
    from nanovllm.kernels.attention.paged_tile import PagedInputs

    meta = problem.meta
    lengths, scale, out = meta.context_len, problem.head_dim**-0.5, torch.empty_like(problem.q)

    def run(choice: Choice) -> Call:
        attend, turns = launch(choice, problem), cycle(problem.kvs)
        return lambda: attend(
            PagedInputs(problem.q, next(turns), meta.block_table, meta.query_start, lengths, scale, out)
        )

    return Point(f"{problem.name} in blocks of {problem.block_size}", run, calls=max(10, len(problem.kvs)))


def decode(device: torch.device) -> list[Contest]:
    """At a head_dim of 128, where no kernel of Hopper's own comes first."""
    from nanovllm.kernels.attention import paged_decode as kernel
    from nanovllm.kernels.cards import first_fit
    from nanovllm.kernels.launch import is_hopper

    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    dtype = dtype_of(device)

    def launch(choice: Choice, problem: Problem) -> Callable[[Any], object]:
        config = kernel.decode_layout(dict(choice), device, problem.head_dim, dtype.itemsize)
        pieces = max(1, num_sms * config.programs_per_sm // NUM_KV_HEADS)
        workspace = kernel.DecodeWorkspace.allocate(pieces, 1, NUM_HEADS, problem.head_dim, device)
        plan = kernel.plan_decode(problem.meta.context_len, pieces, config)
        source = problem.q.clone()

        def attend(inputs: Any) -> None:
            inputs.q.copy_(source)  # as in a layer: a kernel that writes the queries comes first
            kernel.paged_decode(inputs, workspace, plan, config, overlap=True)

        return attend

    now = first_fit(table(device, "decode"), None, head_dim=128, itemsize=2)
    sizes = product((8, 16, 32), (2, 4), (2, 3, 4), (1, 2, 3, 4))
    candidates = [choice_of(tile_kib=k, num_warps=w, num_stages=s, programs_per_sm=p) for k, w, s, p in sizes]
    problems = [problem for problem in decode_problems(dtype) if not (is_hopper(device) and len(problem.lengths) >= 16)]
    points = [attention_point(problem, launch) for problem in problems]
    return [Contest("decode", {"head_dim": [16, 128], "itemsize": [2, 2]}, points, candidates, choice_of(**now))]


def prefill_candidates(head_dim: int, with_tma: bool) -> list[Choice]:
    found = []
    for rows, kib, warps, stages in product((64, 128), (8, 16, 32), (4, 8), (2, 3)):
        choice = choice_of(rows=rows, tile_kib=kib, num_warps=warps, num_stages=stages)
        if rows * (head_dim + kib * 512 // head_dim) <= 128 * 32 * warps:  # registers of a thread, for sums and scores
            found.append(choice)
            if with_tma and warps == 8:
                found.append((*choice, *choice_of(tma=True, max_registers=128)))
    return found


def prefill(device: torch.device) -> list[Contest]:
    from nanovllm.kernels.attention.paged_prefill import paged_prefill, prefill_layout
    from nanovllm.kernels.cards import first_fit
    from nanovllm.kernels.launch import capability

    def launch(choice: Choice, problem: Problem) -> Callable[[Any], object]:
        config = prefill_layout(dict(choice), problem.head_dim, 2)
        return lambda inputs: paged_prefill(inputs, config)

    has_tma = (capability(device) or (0, 0)) >= (9, 0)
    contests = []
    for head_dim in (64, 128):
        for block_sizes in ([16, 63], [64, inf]):
            large = block_sizes[0] == 64
            problems = [p for p in prefill_problems(dtype_of(device), head_dim) if (p.block_size >= 64) == large]
            rows, block_size = table(device, "prefill"), block_sizes[0]
            now = first_fit(rows, None, head_dim=head_dim, itemsize=2, block_size=block_size)
            when = {"head_dim": [head_dim // 2 + 1, head_dim], "itemsize": [2, 2], "block_size": block_sizes}
            candidates = prefill_candidates(head_dim, has_tma and large)
            points = [attention_point(problem, launch) for problem in problems]
            contests.append(Contest("prefill", when, points, candidates, choice_of(**now)))
    return contests


CONTESTS: dict[str, Callable[[torch.device], list[Contest]]] = {
    "linear": linear,
    "fp8": fp8,
    "experts": experts,
    "decode": decode,
    "prefill": prefill,
}
