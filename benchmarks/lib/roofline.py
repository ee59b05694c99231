"""How fast the headline workload could be on this card, from its lengths and two measured rates.

Every decode step has to read the weights once and the keys and values of all that its sequences have seen; prefill has
to do its multiplications. Of a mixture of experts a decode step reads the experts that its tokens choose. The rates are
the best that a plain read kernel and a plain matrix product reach on the same card in the same run
(`benchmarks/kernels/ceilings.py`). Everything else (activations, sampling, the host) is counted as free.
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from timeit import repeat
from typing import Any

import torch

from benchmarks.lib import harness, workloads
from benchmarks.lib.harness import Contender, Measured
from nanovllm.simulate.needs import Architecture, Needs, read_architecture


@dataclass(frozen=True)
class Costs:
    """What a workload cannot do without."""

    prompt_tokens: int
    output_tokens: int
    weight_bytes: int  # read, over all decode steps
    kv_bytes: int  # read, over all decode steps
    prefill_operations: int  # multiplications and additions


@dataclass(frozen=True)
class Limits:
    """What the card can do."""

    bytes_per_second: float
    operations_per_second: float

    def seconds(self, costs: Costs) -> float:
        read = (costs.weight_bytes + costs.kv_bytes) / self.bytes_per_second
        return read + costs.prefill_operations / self.operations_per_second

    def tokens_per_second(self, costs: Costs) -> float:
        return costs.output_tokens / self.seconds(costs)


def costs_of(model: Architecture, prompts: list[int], outputs: list[int], itemsize: int = 2) -> Costs:
    """Costs of generating `outputs[i]` tokens after `prompts[i]` tokens, all requests at once.

    A request's first token comes out of its prefill, so n tokens take n - 1 decode steps, and the step for token j sees
    prompt + j - 1 keys. Prefill computes the logits of the last token of each prompt only.
    """
    needs = Needs(model, itemsize)
    keys = sum(n * (n - 1) // 2 + (n - 1) * p for p, n in zip(prompts, outputs, strict=True))
    pairs = sum(p * (p + 1) // 2 for p in prompts)  # of a query and a key it may see
    products = sum(prompts) * needs.token_operations + len(prompts) * needs.sample_operations
    return Costs(
        prompt_tokens=sum(prompts),
        output_tokens=sum(outputs),
        weight_bytes=sum(needs.read_bytes(sum(n > step for n in outputs)) for step in range(1, max(outputs))),
        kv_bytes=keys * needs.key_bytes,
        prefill_operations=products + pairs * needs.pair_operations,
    )


def headline_costs(model: Path, sizes: workloads.Sizes, itemsize: int) -> Costs:
    prompts, outputs = workloads.headline(0, sizes)
    return costs_of(read_architecture(model)[0], [len(p) for p in prompts], outputs, itemsize)


def measure_limits(device: str) -> Limits:
    """Measured in this process; takes some seconds on a GPU, most of it for compiling read kernels."""
    if torch.device(device).type == "cuda":
        from benchmarks.kernels.ceilings import matmul_rate, read_bandwidth

        return Limits(read_bandwidth(), matmul_rate())
    size = 512
    x, a = torch.ones(64 * 2**20 // 4), torch.ones(size, size)
    read, product = (min(repeat(call, number=1, repeat=3)) for call in (x.sum, lambda: a @ a))
    return Limits(x.nbytes / read, 2 * size**3 / product)


def measure(model: str, device: str, quick: bool) -> list[Measured]:
    """The costs of the headline workload, this card's limits, and what follows from both, as one repetition."""
    sizes, itemsize = (workloads.QUICK, 4) if quick else (workloads.HEADLINE, 2)
    costs, limits = headline_costs(Path(model), sizes, itemsize), measure_limits(device)
    found = {
        "workload": asdict(sizes),
        "costs": asdict(costs),
        "limits": asdict(limits),
        "seconds": limits.seconds(costs),
        "tokens_per_second": limits.tokens_per_second(costs),
        "weights_ms": 1e3 * read_architecture(Path(model))[0].num_parameters * itemsize / limits.bytes_per_second,
    }
    return [{"roofline": found}]


def roofline(options: argparse.Namespace) -> dict[str, Any]:
    """What `measure` finds in a process of its own: this one must not hold memory of the card while others measure."""
    arguments = {"model": str(options.model), "device": options.device, "quick": options.quick}
    measured = harness.run_process(Contender("the roofline"), measure, arguments, options)
    found: dict[str, Any] = measured["repetitions"][0]["roofline"]
    print(describe(found), flush=True)
    return found


def describe(result: dict[str, Any]) -> str:
    costs, limits = result["costs"], result["limits"]
    return (
        f"limit of this workload: {result['tokens_per_second']:,.0f} output tokens/s "
        f"({costs['kv_bytes'] / 1e12:.2f} TB of KV and {costs['weight_bytes'] / 1e12:.2f} TB of weights at "
        f"{limits['bytes_per_second'] / 1e9:,.0f} GB/s, {costs['prefill_operations'] / 1e12:.0f} TFLOP of prefill at "
        f"{limits['operations_per_second'] / 1e12:.0f} TFLOP/s)"
    )
