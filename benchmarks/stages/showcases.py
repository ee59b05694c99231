"""The showcase of every stage: the workload that shows what it is for, and one or two where it gains nothing.

Lengths are chosen so that a showcase takes about two minutes on two slow cores. `quick` makes them tiny, for tests:
the figures then mean nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.lib.harness import Contender, Figure, Measured, Showcase, higher, lower
from benchmarks.lib.workloads import Request, Scenario, make_requests, mixed_lengths, share_prefix
from benchmarks.stages.runners import hf_contender, stage_contender

HF = "HF generate"
HF_BATCH = "HF padded batch"
HF_ONE = "HF one by one"


def naive(vocab_size: int, quick: bool = False) -> Showcase:
    prompts, tokens = ((8, 24), 4) if quick else ((64, 384), 32)
    names = [f"after {n}" for n in prompts]
    without_cache = "HF without cache"
    return Showcase(
        name="stage_1",
        title="Naive generation beside Hugging Face",
        workload=f"one request of {prompts[0]}, then one of {prompts[1]} prompt tokens; {tokens} tokens each",
        contenders=[
            stage_contender(1),
            hf_contender(without_cache, cache=False),
            hf_contender("HF with cache"),
        ],
        scenarios=[
            Scenario(name, [make_requests([(n, tokens)], vocab_size, seed=n)])
            for name, n in zip(names, prompts, strict=True)
        ],
        figures=[
            lower(f"ms_{n}", f"time per token, prompt of {n}", "ms", name, "ms_per_token")
            for name, n in zip(names, prompts, strict=True)
        ],
        headline=f"ms_{prompts[-1]}",
        contender="stage 1",
        rival=without_cache,
    )


def kv_cache(vocab_size: int, quick: bool = False) -> Showcase:
    contexts, tokens, batch = ((8, 16, 24, 32), 4, 3) if quick else ((64, 256, 512, 1024), 12, 8)
    scenarios = [Scenario(f"context {n}", [make_requests([(n, tokens)], vocab_size, seed=n)]) for n in contexts]
    scenarios.append(Scenario("batch", [make_requests([(contexts[0], tokens)] * batch, vocab_size, seed=1)]))
    first, last = contexts[0], contexts[-1]

    def growth(measured: Measured) -> float:
        longest: float = measured[f"context {last}"]["decode_ms"]
        return longest / measured[f"context {first}"]["decode_ms"]

    return Showcase(
        name="stage_2",
        title="Time per token as the context grows",
        workload=f"one request of {', '.join(map(str, contexts))} prompt tokens; {batch} requests at once; "
        f"{tokens} tokens each",
        contenders=[stage_contender(1), stage_contender(2), hf_contender(HF, batch=True)],
        scenarios=scenarios,
        figures=[
            *(
                lower(f"decode_{n}", f"time per token, context {n}", "ms", f"context {n}", "decode_ms")
                for n in contexts
            ),
            Figure("growth", f"growth from {first} to {last}", "times", "lower", growth),
            higher("batch", f"{batch} requests at once", "tokens/s", "batch", "tokens_per_second"),
        ],
        headline=f"decode_{last}",
        shown=(f"decode_{first}", f"decode_{last}", "growth"),
        contender="stage 2",
        rival="stage 1",
    )


def paged_blocks(vocab_size: int, quick: bool = False) -> Showcase:
    count, prompt, output, slots = (6, (4, 12), (2, 4), 128) if quick else (18, (16, 96), (8, 32), 2048)
    lengths = mixed_lengths(count, prompt, output, seed=3, long_every=6, long=5)
    equal = [(prompt[1], output[1])] * (3 if quick else 12)
    return Showcase(
        name="stage_3",
        title="Sequences in the same KV memory",
        workload=f"{count} requests of {prompt[0]} to {prompt[1]} prompt tokens and {output[0]} to {output[1]} to "
        f"generate, every sixth five times as long; KV memory for {slots} tokens",
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
        contender="stage 3",
        rival="stage 2",
        notes=["wasted: slots that a sequence holds at its end and that no key or value was written to"],
    )


def prefix_caching(vocab_size: int, quick: bool = False) -> Showcase:
    count, shared, own, tokens, short = (3, 32, 4, 2, 16) if quick else (12, 480, 24, 8, 64)

    def prompts(seed: int) -> list[Request]:
        return share_prefix(make_requests([(own, tokens)] * count, vocab_size, seed), shared, vocab_size, seed)

    return Showcase(
        name="stage_4",
        title="Time to first token behind a shared beginning",
        workload=f"{count} prompts of {shared + own} tokens sharing the first {shared}, and {count} of {short} "
        f"sharing nothing; "
        f"{tokens} tokens each",
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
        contender="stage 4",
        rival="stage 3",
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

    return Showcase(
        name="stage_5",
        title="Throughput at mixed lengths",
        workload=f"{count} requests of {prompt[0]} to {prompt[1]} prompt tokens and {output[0]} to {output[1]} to "
        f"generate, every eighth five times as long, at most {seats} in a step; "
        f"again with KV memory for {tiny} tokens in all",
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
        contender="stage 5",
        rival="stage 4",
    )


def batches_of(batches: tuple[int, ...], prompt: int, tokens: int, vocab_size: int, **how: bool) -> list[Scenario]:
    """So many requests at once, `prompt` tokens in and `tokens` out."""
    requests = {n: make_requests([(prompt, tokens)] * n, vocab_size, seed=n) for n in batches}
    return [Scenario(f"batch {n}", [requests[n]], max_num_seqs=n, **how) for n in batches]


def decode_steps(batches: tuple[int, ...]) -> list[Figure]:
    return [lower(f"decode_{n}", f"decode step, batch {n}", "ms", f"batch {n}", "decode_ms") for n in batches]


def cuda_graphs(vocab_size: int, quick: bool = False) -> Showcase:
    """On a GPU; a quick one runs anywhere, with the eager stand-in for the graph."""
    batches, prompt, tokens = ((1, 3), 8, 4) if quick else ((1, 8, 64), 64, 32)
    contenders = [stage_contender(5), stage_contender(6), hf_contender(HF, batch=True)]
    if not quick:
        compiled = {"kind": "stage", "number": 6, "compiled": True, "options": {}}
        contenders.append(Contender("stage 6 compiled", compiled))
        contenders.append(stage_contender(5, only=("batch 1",), name="stage 5 with the kernel", attention="triton"))
    return Showcase(
        name="stage_6",
        title="Time of a decode step",
        workload=f"{' or '.join(map(str, batches))} requests at once, {prompt} prompt tokens and {tokens} to generate",
        contenders=contenders,
        scenarios=batches_of(batches, prompt, tokens, vocab_size),
        figures=decode_steps(batches),
        contender="stage 6",
        rival="stage 5",
        notes=["stage 5 gathers keys and values; on a GPU stage 6 reads them by the Triton kernel, as stage 5 can"],
    )


def ranks_contender(ranks: int) -> Contender:
    name = f"stage 7, {ranks} rank{'s' if ranks > 1 else ''}"
    return stage_contender(7, name=name, tensor_parallel_size=ranks)


def tensor_parallel(vocab_size: int, quick: bool = False) -> Showcase:
    batches, prompt, tokens = ((1, 3), 8, 4) if quick else ((1, 8), 64, 32)
    ranks = (1, 2) if quick else (1, 2, 4)
    return Showcase(
        name="stage_7",
        title="Memory and time of a rank",
        workload=f"{' or '.join(map(str, batches))} requests at once, {prompt} prompt tokens and {tokens} to generate",
        contenders=[stage_contender(5), *map(ranks_contender, ranks), hf_contender(HF, batch=True)],
        scenarios=batches_of(batches, prompt, tokens, vocab_size, several_processes=True),
        figures=[
            lower("weights", "weights a rank", "MiB", "batch 1", "weights_mib"),
            lower("kv", "KV memory a rank", "MiB", "batch 1", "kv_mib"),
            *decode_steps(batches),
        ],
        shown=("weights", f"decode_{batches[0]}", f"decode_{batches[1]}"),
        contender="stage 7, 2 ranks",
        rival="stage 5",
        notes=["on a CPU the ranks share the same cores, so all that they gain is memory; on GPUs each has its own"],
    )


SHOWCASES = {
    1: naive,
    2: kv_cache,
    3: paged_blocks,
    4: prefix_caching,
    5: continuous_batching,
    6: cuda_graphs,
    7: tensor_parallel,
}
# Showcases that say something on a GPU only, and the shape of the model that they are recorded with (benchmarks/shapes)
NEED_A_GPU = {6: "Qwen3-0.6B"}


def within_reach(showcase: Showcase, device: str) -> Showcase:
    """Without the contenders that want more GPUs than there are."""
    if not device.startswith("cuda"):
        return showcase
    found = torch.cuda.device_count()
    kept = [c for c in showcase.contenders if c.spec.get("options", {}).get("tensor_parallel_size", 1) <= found]
    return replace(showcase, contenders=kept)
