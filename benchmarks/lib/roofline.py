"""How fast the headline workload could be on this card, from its lengths and two measured rates.

    python -m benchmarks.lib.roofline --out DIR

Every decode step has to read the weights once and the keys and values of all that its sequences have seen; prefill has
to do its multiplications. The rates are the best that a plain read kernel and a plain matrix product reach on the same
card in the same run (`benchmarks/kernels/ceilings.py`). Everything else (activations, sampling, the host) is counted
as free.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import headline
from benchmarks.engine.engine_harness import add_options, check_options, commit, write
from benchmarks.lib.harness import ROOT, model_name
from benchmarks.lib.worker import facts
from nanovllm.models.config import ModelConfig, read_config
from nanovllm.models.transformer import Transformer


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


def num_parameters(model: ModelConfig) -> dict[str, int]:
    """Parameters, counted on a model without memory: of the layers' matrices, of the output head, and all of them."""
    with torch.device("meta"):
        transformer = Transformer(model, max_model_len=1)
    sizes = {name: p.numel() for name, p in transformer.named_parameters()}
    matrices = sum(p.numel() for p in transformer.layers.parameters() if p.dim() == 2)
    return {"matrices": matrices, "head": sizes["embed_tokens.weight"], "all": sum(sizes.values())}


def costs_of(model: ModelConfig, prompts: list[int], outputs: list[int], itemsize: int = 2) -> Costs:
    """Costs of generating `outputs[i]` tokens after `prompts[i]` tokens, all requests at once. A number has `itemsize`
    bytes.

    A request's first token comes out of its prefill, so n tokens take n - 1 decode steps, and the step for token j sees
    prompt + j - 1 keys. Prefill computes the logits of the last token of each prompt only.
    """
    parameters = num_parameters(model)
    read_each_step = parameters["all"] - (0 if model.tie_word_embeddings else parameters["head"])
    keys = sum(n * (n - 1) // 2 + (n - 1) * p for p, n in zip(prompts, outputs, strict=True))
    kv_bytes = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * itemsize  # of a token
    pairs = sum(p * (p + 1) // 2 for p in prompts)  # of a query and a key it may see
    attention = 4 * pairs * model.num_hidden_layers * model.num_attention_heads * model.head_dim
    products = 2 * (sum(prompts) * parameters["matrices"] + len(prompts) * parameters["head"])
    return Costs(
        prompt_tokens=sum(prompts),
        output_tokens=sum(outputs),
        weight_bytes=(max(outputs) - 1) * read_each_step * itemsize,
        kv_bytes=keys * kv_bytes,
        prefill_operations=products + attention,
    )


def headline_costs(model: Path, sizes: headline.Sizes, itemsize: int) -> Costs:
    prompts, outputs = headline.draw(0, sizes)
    return costs_of(read_config(model), [len(p) for p in prompts], outputs, itemsize)


def measure_limits(device: str) -> Limits:
    """Measured in this process; takes some seconds on a GPU, most of it for compiling read kernels."""
    if torch.device(device).type == "cuda":
        from benchmarks.kernels.ceilings import matmul_rate, read_bandwidth

        return Limits(read_bandwidth()["bytes_per_second"], matmul_rate()["operations_per_second"])
    size = 512
    x, a = torch.ones(64 * 2**20 // 4), torch.ones(size, size)
    read = min(seconds(lambda: x.sum()) for _ in range(3))
    product = min(seconds(lambda: a @ a) for _ in range(3))
    return Limits(x.numel() * x.element_size() / read, 2 * size**3 / product)


def seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def roofline(options: argparse.Namespace) -> dict[str, Any]:
    """The costs of the headline workload, this card's limits, and what follows from both."""
    sizes, itemsize = (headline.QUICK, 4) if options.quick else (headline.HEADLINE, 2)
    costs, limits = headline_costs(options.model, sizes, itemsize), measure_limits(options.device)
    return {
        "name": "roofline",
        "machine": facts(options.device),
        "commit": commit(options),
        "model": {"name": model_name(options.model)},
        "workload": asdict(sizes),
        "costs": asdict(costs),
        "limits": asdict(limits),
        "seconds": limits.seconds(costs),
        "tokens_per_second": limits.tokens_per_second(costs),
        "weights_ms": 1e3 * num_parameters(read_config(options.model))["all"] * itemsize / limits.bytes_per_second,
    }


def in_a_process(options: argparse.Namespace) -> dict[str, Any]:
    """The same, measured in a process of its own: this one must not hold memory of the card while others measure."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "benchmarks.lib.roofline", "--out", scratch, "--model", str(options.model)]
        command += ["--device", options.device] + ["--quick"] * options.quick
        command += ["--commit", options.commit] if options.commit else []
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        [path] = Path(scratch).iterdir()
        result: dict[str, Any] = json.loads(path.read_text())
    return result


def describe(result: dict[str, Any]) -> str:
    costs, limits = result["costs"], result["limits"]
    return (
        f"limit of this workload: {result['tokens_per_second']:,.0f} output tokens/s "
        f"({costs['kv_bytes'] / 1e12:.2f} TB of KV and {costs['weight_bytes'] / 1e12:.2f} TB of weights at "
        f"{limits['bytes_per_second'] / 1e9:,.0f} GB/s, {costs['prefill_operations'] / 1e12:.0f} TFLOP of prefill at "
        f"{limits['operations_per_second'] / 1e12:.0f} TFLOP/s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lib.roofline", description=(__doc__ or "").split("\n")[0]
    )
    add_options(parser)
    options = check_options(parser.parse_args())
    result = roofline(options)
    print(describe(result))
    print(f"written to {write(result, options.out)}")


if __name__ == "__main__":
    main()
