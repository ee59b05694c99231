"""The showcase of every stage: the workload that shows what it is for, and one or two where it gains nothing; one
workload for all stages; and the engine on a CPU, beside Hugging Face.

Lengths are chosen so that a showcase takes about two minutes on two slow cores. `quick` makes them tiny, for tests:
the figures then mean nothing.
"""

from dataclasses import replace
from typing import Any

import torch

from benchmarks.lib.harness import Contender, Figure, Measured, Showcase, higher, lower
from benchmarks.lib.workloads import Request, Scenario, make_requests, mixed_lengths, share_prefix
from benchmarks.stages.runners import hf_contender, stage_contender
from tools.make_models import model_dir

HF = "HF generate"
HF_BATCH = "HF padded batch"
HF_ONE = "HF one by one"
ENGINE = "nanovllm"
# How many times better than whom the engine has to be on a CPU
TARGETS = {"ms_1": (HF_ONE, 1.0), "rate_16": (HF_ONE, 4.0), "rate_mixed": (HF_BATCH, 1.0)}
SMOLLM2 = model_dir()


def of_stage(number: int, title: str, workload: str, **parts: Any) -> Showcase:
    """A showcase that stage `number` is to win, against the stage before it if `parts` do not say otherwise."""
    parts = {"contender": f"stage {number}", "rival": f"stage {number - 1}"} | parts
    return Showcase(f"stage_{number}", title, workload, **parts)


def range_of(prompt: tuple[int, int], output: tuple[int, int]) -> str:
    return f"{prompt[0]} to {prompt[1]} prompt tokens and {output[0]} to {output[1]} to generate"


def naive(vocab_size: int, quick: bool = False) -> Showcase:
    prompts, tokens = ((8, 24), 4) if quick else ((64, 384), 32)
    rival = hf_contender("HF without cache", cache=False)
    return of_stage(
        1,
        "Naive generation beside Hugging Face",
        f"one request of {prompts[0]}, then one of {prompts[1]} prompt tokens; {tokens} tokens each",
        contenders=[stage_contender(1), rival, hf_contender("HF with cache")],
        scenarios=[Scenario(f"{n}", [make_requests([(n, tokens)], vocab_size, seed=n)]) for n in prompts],
        figures=[lower(f"ms_{n}", f"time per token, prompt of {n}", "ms", f"{n}", "ms_per_token") for n in prompts],
        headline=f"ms_{prompts[-1]}",
        rival=rival.name,
    )


def kv_cache(vocab_size: int, quick: bool = False) -> Showcase:
    contexts, tokens, batch = ((8, 16, 24, 32), 4, 3) if quick else ((64, 256, 512, 1024), 12, 8)
    scenarios = [Scenario(f"{n}", [make_requests([(n, tokens)], vocab_size, seed=n)]) for n in contexts]
    scenarios.append(Scenario("batch", [make_requests([(contexts[0], tokens)] * batch, vocab_size, seed=1)]))
    first, last = contexts[0], contexts[-1]
    figures = [lower(f"decode_{n}", f"time per token, context {n}", "ms", f"{n}", "decode_ms") for n in contexts]

    def growth(measured: Measured) -> float:
        longest: float = measured[f"{last}"]["decode_ms"]
        return longest / measured[f"{first}"]["decode_ms"]

    figures.append(Figure("growth", f"growth from {first} to {last}", "times", "lower", growth))
    figures.append(higher("batch", f"{batch} requests at once", "tokens/s", "batch", "tokens_per_second"))
    prompts = f"one request of {', '.join(map(str, contexts))} prompt tokens"
    return of_stage(
        2,
        "Time per token as the context grows",
        f"{prompts}; {batch} requests at once; {tokens} tokens each",
        contenders=[stage_contender(1), stage_contender(2), hf_contender(HF, batch=True)],
        scenarios=scenarios,
        figures=figures,
        headline=f"decode_{last}",
        shown=(f"decode_{first}", f"decode_{last}", "growth"),
    )


def paged_blocks(vocab_size: int, quick: bool = False) -> Showcase:
    count, prompt, output, slots = (6, (4, 12), (2, 4), 128) if quick else (18, (16, 96), (8, 32), 2048)
    lengths = mixed_lengths(count, prompt, output, seed=3, long_every=6, long=5)
    equal = [(prompt[1], output[1])] * (3 if quick else 12)
    return of_stage(
        3,
        "Sequences in the same KV memory",
        f"{count} requests of {range_of(prompt, output)}, every sixth five times as long; KV memory for {slots} tokens",
        contenders=[stage_contender(2), stage_contender(3), hf_contender(HF_BATCH, batch=True)],
        scenarios=[
            Scenario("mixed", [make_requests(lengths, vocab_size, seed=3)], kv_slots=slots),
            Scenario("equal", [make_requests(equal, vocab_size, seed=4)]),
        ],
        figures=[
            higher("at_once", "sequences at once", "", "mixed", "most_at_once"),
            lower("waste", "KV memory wasted", "%", "mixed", "waste_percent"),
            higher("mixed", "throughput", "tokens/s", "mixed", "tokens_per_second"),
            higher("equal", "equal lengths, memory for all", "tokens/s", "equal", "tokens_per_second"),
        ],
        shown=("at_once", "waste", "mixed"),
        notes=["wasted: slots that a sequence holds at its end and that no key or value was written to"],
    )


def prefix_caching(vocab_size: int, quick: bool = False) -> Showcase:
    count, shared, own, tokens, short = (3, 32, 4, 2, 16) if quick else (12, 480, 24, 8, 64)

    def prompts(seed: int) -> list[Request]:
        return share_prefix(make_requests([(own, tokens)] * count, vocab_size, seed), shared, vocab_size, seed)

    sharing = f"{count} prompts of {shared + own} tokens sharing the first {shared}"
    return of_stage(
        4,
        "Time to first token behind a shared beginning",
        f"{sharing}, and {count} of {short} sharing nothing; {tokens} tokens each",
        contenders=[stage_contender(3), stage_contender(4), hf_contender(HF, batch=True)],
        scenarios=[
            Scenario("turns", [[request] for request in prompts(1)]),
            Scenario("call", [prompts(2)]),
            Scenario("unrelated", [make_requests([(short, tokens)] * count, vocab_size, seed=3)]),
        ],
        figures=[
            lower("turns", "time to first token, one after another", "ms", "turns", "ttft_ms"),
            lower("call", "time to first token, in one call", "ms", "call", "ttft_ms"),
            lower("slots", "KV memory, in one call", "tokens", "call", "peak_slots"),
            higher("unrelated", f"prompts of {short}, nothing shared", "tokens/s", "unrelated", "tokens_per_second"),
        ],
        shown=("turns", "call", "slots"),
        notes=["time to first token: mean over the requests, the first one, which finds nothing, included"],
    )


def continuous_batching(vocab_size: int, quick: bool = False) -> Showcase:
    count, prompt, output, seats, long = (6, (4, 12), (16, 24), 4, 1) if quick else (24, (16, 64), (8, 24), 8, 5)
    lengths = mixed_lengths(count, prompt, output, seed=5, long_every=8, long=long)
    requests = make_requests(lengths, vocab_size, seed=5)
    longest = max(request.length for request in requests)
    tiny = -(-longest // 16) * 16 + 4 * seats  # hardly more than the longest needs alone
    even = make_requests([(prompt[1], output[1])] * seats, vocab_size, seed=6)

    def survived(measured: Measured) -> float | None:
        """1 if the tiny pool changed no token."""
        if "tiny" not in measured:
            return None
        return float(measured["tiny"]["tokens_digest"] == measured["mixed"]["tokens_digest"])

    mixed = f"{count} requests of {range_of(prompt, output)}, every eighth five times as long"
    return of_stage(
        5,
        "Throughput at mixed lengths",
        f"{mixed}, at most {seats} in a step; again with KV memory for {tiny} tokens in all",
        contenders=[
            stage_contender(4),
            stage_contender(5),
            hf_contender(HF_BATCH, batch=True, only=("mixed", "even")),
            hf_contender(HF_ONE, only=("mixed",)),
        ],
        scenarios=[
            Scenario("mixed", [requests], max_num_seqs=seats),
            Scenario("tiny", [requests], max_num_seqs=seats, kv_slots=tiny),
            Scenario("even", [even], max_num_seqs=seats),
        ],
        figures=[
            higher("mixed", "throughput", "tokens/s", "mixed", "tokens_per_second"),
            higher("tiny", "in a tiny pool", "tokens/s", "tiny", "tokens_per_second"),
            lower("preemptions", "preemptions there", "", "tiny", "preemptions"),
            Figure("survived", "tokens unchanged there", "yes/no", "higher", survived),
            higher("even", "equal lengths", "tokens/s", "even", "tokens_per_second"),
        ],
        shown=("mixed", "tiny"),
    )


def decode_showcase(
    number: int, title: str, batches: tuple[int, ...], quick: bool, vocab_size: int, figures: list[Figure], **parts: Any
) -> Showcase:
    """So many requests at once: the time of a decode step, behind other `figures`."""
    prompt, tokens = (8, 4) if quick else (64, 32)
    steps = [lower(f"decode_{n}", f"decode step, batch {n}", "ms", f"batch {n}", "decode_ms") for n in batches]
    return of_stage(
        number,
        title,
        f"{' or '.join(map(str, batches))} requests at once, {prompt} prompt tokens and {tokens} to generate",
        scenarios=[
            Scenario(f"batch {n}", [make_requests([(prompt, tokens)] * n, vocab_size, n)], max_num_seqs=n)
            for n in batches
        ],
        figures=figures + steps,
        rival="stage 5",
        **parts,
    )


def cuda_graphs(vocab_size: int, quick: bool = False) -> Showcase:
    """On a GPU; a quick one runs anywhere, with the eager stand-in for the graph."""
    contenders = [stage_contender(5), stage_contender(6), hf_contender(HF, batch=True)]
    if not quick:
        compiled = {"kind": "stage", "number": 6, "compiled": True, "options": {}}
        contenders.append(Contender("stage 6 compiled", arguments={"spec": compiled}))
        contenders.append(stage_contender(5, only=("batch 1",), name="stage 5 with the kernel", attention="triton"))
    notes = ["stage 5 gathers keys and values; on a GPU stage 6 reads them by the Triton kernel, as stage 5 can"]
    batches, title = (1, 3) if quick else (1, 8, 64), "Time of a decode step"
    return decode_showcase(6, title, batches, quick, vocab_size, [], contenders=contenders, notes=notes)


def tensor_parallel(vocab_size: int, quick: bool = False) -> Showcase:
    batches = (1, 3) if quick else (1, 8)
    contenders = [stage_contender(5)]
    for ranks in (1, 2) if quick else (1, 2, 4):
        name = f"stage 7, {ranks} rank{'s' if ranks > 1 else ''}"
        contenders.append(stage_contender(7, name=name, tensor_parallel_size=ranks))
    return decode_showcase(
        7,
        "Memory and time of a rank",
        batches,
        quick,
        vocab_size,
        [
            lower("weights", "weights a rank", "MiB", "batch 1", "weights_mib"),
            lower("kv", "KV memory a rank", "MiB", "batch 1", "kv_mib"),
        ],
        contenders=[*contenders, hf_contender(HF, batch=True)],
        shown=("weights", *(f"decode_{n}" for n in batches)),
        contender="stage 7, 2 ranks",
        notes=["on a CPU the ranks share the same cores, so all that they gain is memory; on GPUs each has its own"],
    )


def ladder(vocab_size: int, quick: bool = False) -> Showcase:
    """One identical workload through Hugging Face and every stage."""
    count, prompt, output, shared, slots = (
        (4, (4, 12), (2, 4), 16, 128) if quick else (18, (16, 64), (8, 24), 192, 1536)
    )
    own = make_requests(mixed_lengths(count, prompt, output, seed=7, long_every=6, long=3), vocab_size, seed=7)
    with_prefix = share_prefix(own, shared, vocab_size, seed=7)
    requests = [with_prefix[i] if i % 3 else own[i] for i in range(count)]  # two in three share their beginning
    contenders = [hf_contender(HF_ONE), hf_contender(HF_BATCH, batch=True)]
    contenders.append(hf_contender("HF padded, any memory", batch=True, limited=False))
    contenders += [stage_contender(n) for n in (1, 2, 3, 4, 5)]
    return Showcase(
        name="ladder",
        title="One workload through every stage",
        workload=f"{count} requests of {range_of(prompt, output)}, every sixth three times as long; two in three open "
        f"with the same {shared} tokens; KV memory for {slots} tokens, at most 8 sequences in a step"
        " (Hugging Face once with all the memory it wants)",
        contenders=contenders,
        scenarios=[Scenario("ladder", [requests], kv_slots=slots, max_num_seqs=8)],
        figures=[
            higher("throughput", "throughput", "tokens/s", "ladder", "tokens_per_second"),
            lower("ttft", "time to first token", "ms", "ladder", "ttft_ms"),
            higher("at_once", "sequences at once", "", "ladder", "most_at_once"),
        ],
        shown=("throughput",),
        contender="stage 5",
        rival="stage 1",
    )


# --- the engine on a CPU ----------------------------------------------------------------------------------------------


def engine_cpu(vocab_size: int, quick: bool = False, name: str = "engine_cpu", tokens: int = 32) -> Showcase:
    """On a CPU in float32. tokens: to generate for each request, the longest of the mixed ones aside."""
    prompt, batch, tokens = (8, 3, 4) if quick else (32, 16, tokens)
    low, high = prompt // 4, 2 * prompt
    lengths = mixed_lengths(batch, (low, high), (tokens // 4, 2 * tokens), seed=3)
    return Showcase(
        name=name,
        title="The engine on a CPU",
        workload=f"one request, {batch} alike ({prompt} tokens in, {tokens} out), and {batch} of mixed lengths "
        f"({low} to {high} in, {tokens // 4} to {2 * tokens} out); greedy, float32",
        contenders=[
            Contender(ENGINE, arguments={"spec": {"kind": "engine"}}),
            hf_contender(HF_ONE),
            hf_contender(HF_BATCH, batch=True, limited=False, only=("alike", "mixed")),
        ],
        scenarios=[
            Scenario("one", [make_requests([(prompt, 2 * tokens)], vocab_size, seed=1)]),
            Scenario("alike", [make_requests([(prompt, tokens)] * batch, vocab_size, seed=2)], max_num_seqs=batch),
            Scenario("mixed", [make_requests(lengths, vocab_size, seed=4)], max_num_seqs=batch),
        ],
        figures=[
            lower("ms_1", "time per token, batch 1", "ms", "one", "ms_per_token"),
            higher("rate_16", f"{batch} alike", "tokens/s", "alike", "tokens_per_second"),
            higher("rate_mixed", f"{batch} of mixed lengths", "tokens/s", "mixed", "tokens_per_second"),
        ],
        headline="rate_16",
        rival=HF_ONE,
    )


def engine_cpu_smollm2(vocab_size: int, quick: bool = False) -> Showcase:
    return engine_cpu(vocab_size, quick, "engine_cpu_smollm2", tokens=16)


SHOWCASES = dict(
    enumerate(
        (naive, kv_cache, paged_blocks, prefix_caching, continuous_batching, cuda_graphs, tensor_parallel), start=1
    )
)
OTHERS = {"ladder": ladder, "engine": engine_cpu, "smollm2": engine_cpu_smollm2}
# Showcases that say something on a GPU only, and the shape of the model that they are recorded with (benchmarks/shapes)
NEED_A_GPU = {"6": "Qwen3-0.6B"}


def ranks_of(contender: Contender) -> int:
    """The number of its processes. Each has a GPU of its own, if there are GPUs."""
    ranks: int = contender.arguments["spec"].get("options", {}).get("tensor_parallel_size", 1)
    return ranks


def within_reach(showcase: Showcase, device: str) -> Showcase:
    """Without the contenders that want more GPUs than there are."""
    if not device.startswith("cuda"):
        return showcase
    found = torch.cuda.device_count()
    return replace(showcase, contenders=[c for c in showcase.contenders if ranks_of(c) <= found])
