"""The showcase of stage 7: the same tokens from 1, 2 and 4 ranks, the memory of each, and what the sums cost."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.lib.harness import Contender, Figure, Showcase, hf_contender, metric, stage_contender
from benchmarks.lib.workloads import Scenario, make_requests


def ranks_contender(ranks: int) -> Contender:
    spec = {"kind": "stage", "number": 7, "options": {"tensor_parallel_size": ranks}}
    return Contender(f"stage 7, {ranks} rank{'s' if ranks > 1 else ''}", spec)


def tensor_parallel(vocab_size: int, quick: bool = False) -> Showcase:
    batches, prompt, tokens = ((1, 3), 8, 4) if quick else ((1, 8), 64, 32)
    ranks = (1, 2) if quick else (1, 2, 4)
    return Showcase(
        name="stage_7",
        title="Memory and time of a rank",
        workload=f"{' or '.join(map(str, batches))} requests at once, {prompt} prompt tokens and {tokens} to generate",
        contenders=[stage_contender(5), *map(ranks_contender, ranks), hf_contender("HF generate", batch=True)],
        scenarios=[
            Scenario(
                f"batch {n}",
                [make_requests([(prompt, tokens)] * n, vocab_size, seed=n)],
                max_num_seqs=n,
                several_processes=True,
            )
            for n in batches
        ],
        figures=[
            Figure("weights", "weights a rank", "MiB", "lower", metric("batch 1", "weights_mib")),
            Figure("kv", "KV memory a rank", "MiB", "lower", metric("batch 1", "kv_mib")),
            *(
                Figure(f"decode_{n}", f"decode step, batch {n}", "ms", "lower", metric(f"batch {n}", "decode_ms"))
                for n in batches
            ),
        ],
        headline="weights",
        shown=("weights", f"decode_{batches[0]}", f"decode_{batches[1]}"),
        contender="stage 7, 2 ranks",
        rival="stage 5",
        notes=["on a CPU the ranks share the same cores, so all that they gain is memory; on GPUs each has its own"],
    )


def within_reach(showcase: Showcase, device: str) -> Showcase:
    """Without the contenders that want more GPUs than there are."""
    if not device.startswith("cuda"):
        return showcase
    found = torch.cuda.device_count()
    kept = [c for c in showcase.contenders if c.spec.get("options", {}).get("tensor_parallel_size", 1) <= found]
    return replace(showcase, contenders=kept)
