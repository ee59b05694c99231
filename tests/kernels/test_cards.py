"""Cards that are not here: our kernels compile for them and fit, and no request waits for a compiler."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

ROOT = Path(__file__).parents[2]
KIB = 1024
# By compute capability, what a program may have and what a multiprocessor has: NVIDIA's CUDA Programming Guide,
# "Technical Specifications per Compute Capability".
SHARED = {75: (64, 64), 80: (163, 164), 86: (99, 100), 89: (99, 100), 90: (227, 228), 100: (227, 228), 120: (99, 100)}
REGISTERS = 64 * KIB  # of a multiprocessor
OF_EXPERTS = ("_route_kernel", "_sort_kernel", "_grouped_linear_kernel", "_sum_kernel")
IN_FP8 = ("_block_linear_kernel", "_quantise_tokens_kernel")
HOPPER_ONLY = ("_ring_kernel", "_warp_specialized_prefill_kernel", "_weight_prefetch_linear_kernel")


def test_the_page_of_cards_names_them_all() -> None:
    """docs/cards.md says "compiled" of each card that is tested here, and "measured" of Hopper alone."""
    rows = re.findall(r"^\| (\d+)\.(\d) \|.*?\| (\w+) \| (\w+) \|$", (ROOT / "docs/cards.md").read_text(), re.M)
    assert {int(major + minor): (known, dtype) for major, minor, known, dtype in rows} == {
        n: ("measured" if n == 90 else "compiled", "float16" if n < 80 else "bfloat16") for n in SHARED
    }


def on_card(capability: int, *arguments: str, caches: Path = Path("there are none")) -> dict[str, Any]:
    """caches: where a user's rows for the card may be."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TQDM_DISABLE": "1", "XDG_CACHE_HOME": str(caches)}
    command = [sys.executable, "-m", "tests.kernels.cards", str(capability), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_every_kernel_fits(capability: int) -> None:
    """Whatever is launched for models of several shapes compiles, and finds the shared memory and registers it needs.
    Attention spills no registers; where the decode kernel counts on several programs at once, they fit."""
    of_program, of_sm = (KIB * n for n in SHARED[capability])
    found = on_card(capability, "compile")
    for kernel, used in found.items():
        assert used["shared"] <= of_program, (kernel, used)
        assert used["registers"] * used["threads"] <= REGISTERS, (kernel, used)
        if "_prefill_kernel" in kernel or "_decode_kernel" in kernel or "_ring_kernel" in kernel:
            # The layout by TMA keeps for the end what it spills; measured on an H200 it is the fastest all the same.
            assert used["stack"] <= (128 if capability == 90 else 0), (kernel, used)
    names = {kernel.split()[2] for kernel in found}
    assert len(names) >= 14, names
    assert set(OF_EXPERTS) <= names
    for model, num_tiles in (
        ("Qwen3-30B-A3B", 10 if capability == 90 else 6),
        ("Qwen3-30B-A3B-FP8", 6 if capability >= 89 else 0),
        ("Qwen3-30B-A3B-FP8-dynamic", 6 if capability >= 89 else 0),
    ):
        number = sum(kernel.split()[0] == model and "_grouped_linear_kernel" in kernel for kernel in found)
        assert number == num_tiles, (model, number)
    for name in IN_FP8:
        assert (name in names) == (capability >= 89), (name, names)
    # On Hopper `weight_prefetch_linear` takes its place
    assert ("_widening_linear_kernel" in names) == (capability >= 89 and capability != 90), names
    for name in HOPPER_ONLY:
        assert (name in names) == (capability == 90), (name, names)
    for kernel, used in found.items():
        if "_decode_kernel" in kernel:
            assert used["programs"] * (used["shared"] + KIB) <= of_sm, (kernel, used)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "options"),
    [
        (90, {}),
        (90, {"enforce_eager": True, "max_num_seqs": 70, "max_model_len": 1003}),
        (90, {"speculative": {"method": "ngram", "k": 3}, "max_num_seqs": 50}),
        (100, {"model": "Qwen2.5-0.5B", "max_num_seqs": 24, "max_model_len": 1003}),
        (86, {"enforce_eager": True, "max_num_seqs": 33, "max_num_batched_tokens": 300}),
        (90, {"enforce_eager": True, "max_num_seqs": 4, "max_num_batched_tokens": 300, "max_model_len": 300}),
        (75, {"max_num_seqs": 16}),
        (90, {"model": "Qwen3-30B-A3B", "enforce_eager": True, "max_num_seqs": 70}),
        (90, {"model": "Qwen3-30B-A3B-FP8", "enforce_eager": True, "max_num_seqs": 70}),
        (90, {"model": "Qwen3-8B-FP8", "max_num_seqs": 70}),
        (89, {"quantization": "fp8", "enforce_eager": True, "max_num_seqs": 70}),
        (90, {"kv_cache_dtype": "fp8", "speculative": {"method": "ngram", "k": 3}, "max_num_seqs": 50}),
        (90, {"model": "Gemma-3-1B", "speculative": {"method": "ngram", "k": 2}, "max_num_seqs": 24}),
    ],
)
def test_no_request_waits_for_a_compiler(capability: int, options: dict[str, Any]) -> None:
    """Whatever variants steps of odd sizes need, with filters, penalties, grammars, log-probabilities and guesses, the
    start has had them."""
    found = on_card(capability, "storm", json.dumps(options))
    assert found["steps"] > 40 and found["started"] > 20
    assert found["late"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "options"),
    [
        (86, {"max_num_seqs": 3, "max_num_batched_tokens": 40, "max_model_len": 100}),
        (90, {"max_num_seqs": 8, "max_num_batched_tokens": 16}),  # contexts are long
    ],
)
def test_a_small_engine_on_a_card_that_is_not_here(capability: int, options: dict[str, Any]) -> None:
    found = on_card(capability, "storm", json.dumps(options | {"enforce_eager": True}))
    assert found["steps"] > 10 and found["started"] > 15
    assert found["late"] == []


@pytest.mark.slow
def test_no_request_waits_for_a_compiler_on_a_tuned_card(tmp_path: Path) -> None:
    """Whatever is the fastest: the borders of what `make tune` writes lie where the start has a step on both sides."""
    tuned = on_card(90, "tune", caches=tmp_path)
    assert tuned["failed"] == []
    assert [section for section, number in tuned["contests"].items() if number == 0] == ["fp8"]  # not for Hopper
    assert (tmp_path / "nanovllm/tuning/9.0.toml").is_file()
    options = {"model": "Qwen3-30B-A3B", "enforce_eager": True, "max_num_seqs": 70}
    found = on_card(90, "storm", json.dumps(options), caches=tmp_path)
    assert found["steps"] > 40 and found["started"] > 20
    assert found["late"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 24, "max_model_len": 1003},
        {"max_num_seqs": 8},
        {"speculative": {"method": "ngram", "k": 3}, "max_num_seqs": 8, "max_model_len": 300},
        {"model": "Qwen3-30B-A3B-FP8", "raw": {"mlp_only_layers": [0, 1, 4]}, "max_num_seqs": 8, "max_model_len": 300},
        {"model": "Gemma-3-1B", "max_num_seqs": 8, "max_model_len": 1003},
        {"model": "Qwen3-8B-FP8", "max_num_seqs": 8, "max_model_len": 300},
        {"kv_cache_dtype": "fp8", "max_num_seqs": 24, "max_model_len": 300},
        {"model": "Qwen3-8B-FP8", "left": ["layers.4.mlp.down"], "max_num_seqs": 8, "max_model_len": 300},
    ],
    ids=[
        "dense",
        "long contexts",
        "guesses",
        "some layers with experts",
        "some layers with windows",
        "FP8",
        "KV in FP8",
        "FP8 in some layers",
    ],
)
def test_nothing_is_recorded_that_was_not_rehearsed(options: dict[str, Any]) -> None:
    """Kernels would be loaded in a recording, and libraries set up, which no recording survives. A rehearsal with few
    layers has launched the variants and the operations, with their shapes, that the recordings of all layers contain.
    """
    found = on_card(90, "rehearsal", json.dumps({"max_num_batched_tokens": 1000} | options))
    assert found["unknown"] == []
    assert found["known"] > 500 and found["recordings"] > 12
    assert found["attention"] == found["with layers"], "attention once per layer and recording"
