"""What the engine launches on a GPU that is not here: `python -m tests.kernels.cards 86 compile`, `... storm '{}'`,
`... rehearsal '{}'`, or `... tune`.

compile: prints what a program of each kernel takes, for the shapes of several models. storm: starts the engine with
these options, has it compute steps of all odd sizes, and prints which variants were needed only then. rehearsal: starts
it with six layers, and prints what is in a recording and was not launched before. tune: does `make tune` by a clock
that knows chance alone, and prints which candidates could not be launched.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.kernels import tune
from benchmarks.kernels.contest import Call
from benchmarks.kernels.trials import CONTESTS
from nanovllm.engine.plan import Scheduled, Scored, StepMasks, StepPlan
from nanovllm.graphs.cuda_graph import Step
from nanovllm.kernels import has_fp8
from nanovllm.kernels.attention.paged_decode import decode_config
from nanovllm.kernels.cards import user_file
from nanovllm.runner import warm_up
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.sampling_params import SamplingParams
from tests.fp8_checkpoints import BLOCK, CHANNEL
from tests.kernels.absent_gpu import GPU, AbsentGpu, OnMeta, Variant, start

SHAPES = Path(__file__).parents[2] / "benchmarks/shapes"
QWEN3 = json.loads((SHAPES / "Qwen3-0.6B/config.json").read_text())


def shape(hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, **other: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    return QWEN3 | sizes | {"num_key_value_heads": kv_heads, "head_dim": head_dim} | other


SHARED_EXPERT = {
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
WINDOWS = {"sliding_window": 512, "sliding_window_pattern": 2}
MODELS = {
    "Qwen3-0.6B": QWEN3,
    "Qwen2.5-0.5B": shape(896, 4864, 14, 2, 64, model_type="qwen2"),
    "Qwen2.5-7B": shape(3584, 18944, 28, 4, 128, model_type="qwen2"),
    "Gemma-3-1B": shape(1152, 6912, 4, 1, 256, model_type="gemma3_text", vocab_size=262_144, **WINDOWS),
    "Qwen3-8B-FP8": json.loads((SHAPES / "Qwen3-8B/config.json").read_text()) | {"quantization_config": BLOCK},
    "Qwen3-30B-A3B": json.loads((SHAPES / "Qwen3-30B-A3B/config.json").read_text()),
    "Qwen1.5-MoE-A2.7B": shape(2048, 5632, 16, 16, 128, model_type="qwen2_moe", **SHARED_EXPERT),
}
MODELS["Qwen3-30B-A3B-FP8"] = MODELS["Qwen3-30B-A3B"] | {"quantization_config": BLOCK}
MODELS["Qwen3-30B-A3B-FP8-dynamic"] = MODELS["Qwen3-30B-A3B"] | {"quantization_config": CHANNEL}
KV_IN_FP8 = "Qwen3-0.6B", "Gemma-3-1B"  # of these the kernels for a KV cache in FP8 are compiled, too
ATTENTION = ("_decode_kernel", "_prefill_kernel", "_ring_kernel", "_warp_specialized_prefill_kernel")
IN_FP8 = ("_widening_linear_kernel", "_block_linear_kernel", "_quantise_tokens_kernel")
OF_EXPERTS = ("_route_kernel", "_sort_kernel", "_grouped_linear_kernel", "_sum_kernel")
TILED = ("_tiled_linear_kernel", "_grouped_linear_kernel", "_widening_linear_kernel", "_block_linear_kernel")
# These decide what a program takes
TILES = ("TOKENS", "PAIRS", "COLUMNS", "INNER", "SWAPPED", "GATED", "SORTED", "HALVES")


def one_of_each(noted: Sequence[Variant], names: Sequence[str] | None = None) -> Iterator[Variant]:
    """The first variant of each kernel, of each tile of a kernel for linear layers, and of a prefill in pieces."""
    seen = set()
    for variant in noted:
        tile = [variant.constants.get(name) for name in TILES] if variant.name in TILED else []
        key = variant.name, *tile, variant.constants.get("CUT")
        if key not in seen and (names is None or variant.name in names):
            seen.add(key)
            yield variant


def compiled(gpu: AbsentGpu) -> dict[str, Any]:
    """Usage by model and kernel. For all models but the first, of attention and experts alone."""
    found: dict[str, Any] = {}
    kinds = [(model, "auto") for model in MODELS] + [(model, "fp8") for model in KV_IN_FP8 if has_fp8(GPU)]
    for model, kind in kinds:
        raw, before = MODELS[model], len(gpu.noted)
        with OnMeta():  # nothing is recorded that was not rehearsed
            start(raw, recorder=lambda step: step, max_num_seqs=64, kv_cache_dtype=kind)
        of_model = one_of_each(gpu.noted[before:], (*ATTENTION, *IN_FP8, *OF_EXPERTS) if found else None)
        for i, variant in enumerate(of_model):
            config = decode_config(GPU, raw["head_dim"], 2 if kind == "auto" else 1)
            used = variant.compile()._asdict() | {"programs": config.programs_per_sm}
            found[f"{model} {kind}, {variant.name} {i}"] = used
    return found


@dataclass
class Known:
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams


PARAMS = [
    SamplingParams(temperature=1, seed=1),
    SamplingParams(temperature=0.5, top_k=7, seed=2, logprobs=3),
    SamplingParams(temperature=0, seed=3, prompt_logprobs=5),
    SamplingParams(temperature=0.5, seed=5, repetition_penalty=1.3, logit_bias={3: 1.0}, logprobs=0),
]
KEYS = count()


def compute(
    runner: ModelRunner, lengths: Sequence[int], begin: int = 0, guesses: tuple[int, ...] = (), *,
    masked: bool = False, scored: bool = False,
) -> None:  # fmt: skip
    """A step with sequences of so many tokens from position `begin` on, each with other parameters; if it is allowed.
    Every fifth does not sample."""
    if len(lengths) > runner.rows.scratch_row or begin + max(lengths) > runner.rows.max_context_len:
        return
    blocks = [tuple(range(-(-(begin + n) // runner.rows.block_size))) for n in lengths]
    work = [
        Scheduled(next(KEYS), i, begin, n, i % 5 != 3, blocks[i], guesses if n > len(guesses) and i % 5 != 3 else ())
        for i, n in enumerate(lengths)
    ]
    known = {
        s.key: Known([1] * (begin + s.num_tokens), begin + s.num_tokens, PARAMS[s.row % len(PARAMS)]) for s in work
    }
    asked = [s for s in work if scored and s.num_tokens > 1 and known[s.key].params.prompt_logprobs]
    sampled = [s for s in work if s.sample]
    scores = [Scored(s.key, begin, begin + s.num_tokens) for s in asked]
    computed = runner.run(StepPlan(0, work, masked=[s.key for s in sampled] if masked else [], scored=scores), known)
    number = sum(len(s.guesses) + 1 for s in sampled)
    masks = StepMasks([s.key for s in sampled], number, lambda words: words.fill(0))
    runner.draw(computed, masks if masked else None)


def storm(runner: ModelRunner, budget: int, k: int) -> int:
    """Steps of odd sizes, with up to k guesses. Returns how many kinds were asked for."""
    sizes = (1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65, 129, 255, 256)
    asked = 0
    for n in sizes:
        mixed = [(1,) * (n - 1) + (last,) for last in (2, 7, 16, 33, 65, 128, 129, 257, 300, 511, 1000)]
        same = [(length,) * n for length in (1, 3, 5, 17, 65)] + [(3,) * (n // 2) + (77,) * (n - n // 2)]
        for i, lengths in enumerate(mixed + same):
            if sum(lengths) <= budget:
                asked += 1
                compute(runner, lengths, (0, 1, 255, 256, 700, 5000)[(n + i) % 6], masked=i % 7 == 2, scored=i % 4 == 1)
        for guesses in range(1, k + 1):
            if (guesses + 1) * n <= budget:
                asked += 1
                compute(runner, (guesses + 1,) * n, 5, (7,) * guesses, masked=n % 2 == 0)
    return asked


def late(gpu: AbsentGpu, options: dict[str, Any]) -> dict[str, Any]:
    """How many variants the start needed, and which ones the storm added."""
    with OnMeta():
        runner = start(MODELS[options.pop("model", "Qwen3-0.6B")], **options)
        started = len(gpu.noted)
        k = (options.get("speculative") or {}).get("k", 0)
        steps = storm(runner, options.get("max_num_batched_tokens", 16384), k)
    return {"steps": steps, "started": started, "late": [v.describe() for v in gpu.noted[started:]]}


class Operations(TorchDispatchMode):
    """Notes PyTorch's operations, with all that the choice of a kernel may depend on: shapes, strides, dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen = [
            (tuple(a.shape), a.stride(), str(a.dtype)) if isinstance(a, Tensor) else str(a)
            for a in tree_leaves((args, kwargs or {}))
        ]
        self.noted.append(f"{func} {seen}")
        return func(*args, **kwargs or {})


def rehearsed(gpu: AbsentGpu, options: dict[str, Any]) -> dict[str, Any]:
    """How many recordings the start made, how many launches of attention are in them, and what in them was launched
    nowhere before. Nothing is compiled."""
    layers, warm_up.compile_kernels = 6, lambda *_: False
    before, recordings, unknown = set[str](), 0, set[str]()
    attention = 0
    operations = Operations()

    def launched(since: tuple[int, int] = (0, 0)) -> list[str]:
        return [v.describe() for v in gpu.launched[since[0] :]] + operations.noted[since[1] :]

    def record(step: Step) -> Step:
        nonlocal attention, recordings
        if not recordings:
            before.update(launched())
        so_far = len(gpu.launched), len(operations.noted)
        outputs = step()
        recordings += 1
        attention += sum(v.name in ATTENTION for v in gpu.launched[so_far[0] :])
        unknown.update(set(launched(so_far)) - before)
        return lambda: outputs

    raw = MODELS[options.pop("model", "Qwen3-0.6B")] | options.pop("raw", {})
    with OnMeta(), operations:
        runner = start(raw, layers, record, **options)
    assert runner.recorded is not None
    with_layers = len(runner.recorded.decodes._replays) + len(runner.recorded.prompts._replays)
    return {
        "recordings": recordings, "with layers": with_layers, "attention": attention / layers,
        "known": len(before), "unknown": sorted(unknown),
    }  # fmt: skip


def tuned(gpu: AbsentGpu) -> dict[str, Any]:
    chance = random.Random(0)

    def clock(call: Call, calls: int) -> float:
        call()
        return chance.random()

    with OnMeta():
        outcomes = {section: tune.tune(contests(GPU), clock) for section, contests in CONTESTS.items()}
    tune.write({section: tune.rows_of(of) for section, of in outcomes.items()}, user_file(gpu.capability), "by chance")
    failed = [c for of in outcomes.values() for o in of for c in o.contest.candidates if c not in o.times]
    return {"contests": {section: len(of) for section, of in outcomes.items()}, "failed": failed}


if __name__ == "__main__":
    absent = AbsentGpu(int(sys.argv[1]))
    if sys.argv[2] in ("storm", "rehearsal"):
        found = (late if sys.argv[2] == "storm" else rehearsed)(absent, json.loads(sys.argv[3]))
    else:
        found = compiled(absent) if sys.argv[2] == "compile" else tuned(absent)
    print(json.dumps(found))
