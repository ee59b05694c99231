"""The engine on a GPU: fp32 exactly, bf16 and fp16 by the oracle's rules, under every backend; and its memory limit."""

import importlib.util
import pkgutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests import oracle
from tests.engine.adapter import EngineSubject
from tests.oracle_record import record_alone
from tests.stages.requests import PROMPTS, TIGHT, greedy, story_prompts
from tests.weights import lively_qwen3

pytestmark = pytest.mark.gpu

STORY_MODEL = Path(__file__).parents[2] / "assets" / "story_model"
HAS_FLASH = importlib.util.find_spec("flash_attn") is not None
WITHOUT_FLASH = pytest.mark.skipif(not HAS_FLASH, reason="flash-attn is not installed (the extra `flash`)")
BACKENDS = pytest.mark.parametrize("backend", ["torch_ref", "triton", pytest.param("flash_attn", marks=WITHOUT_FLASH)])
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def subject(backend: str = "triton", **config: Any) -> EngineSubject:
    return EngineSubject({"device": "cuda", "attention_backend": backend, "gpu_memory_utilization": 0.3} | config)


@pytest.fixture
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "engine-checkpoints"


@BACKENDS
@HALF
@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
def test_stories_in_half_precision(backend: str, dtype: torch.dtype, overlapped: bool) -> None:
    """20 openings x 64 tokens in chunks of 100, blocks of 256."""
    prompts, params = story_prompts(STORY_MODEL), greedy(64, ignore_eos=True)
    tested = subject(backend, async_scheduling=overlapped)
    engine = tested.engine(STORY_MODEL, block_size=256, num_blocks=64, max_num_batched_tokens=100, dtype=dtype)
    oracle.check_greedy_half(STORY_MODEL, prompts, engine.generate(prompts, params), params, dtype, "cuda")
    tested.check_idle(engine)


@pytest.mark.parametrize("backend", ["torch_ref", "triton"])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
def test_stories_in_fp32(backend: str, block_size: int, overlapped: bool) -> None:
    """Identical tokens, in a pool that is too small and with the prefix cache warm."""
    prompts, params = story_prompts(STORY_MODEL), greedy(64, ignore_eos=True)
    tested = subject(backend, async_scheduling=overlapped)
    options = {"block_size": block_size, "num_blocks": 1600 // block_size, "max_num_batched_tokens": 100}
    engine = tested.engine(STORY_MODEL, **options, dtype=torch.float32)
    for _ in range(2):
        oracle.check_greedy(STORY_MODEL, prompts, engine.generate(prompts, params), params)
        tested.check_idle(engine)


@BACKENDS
@HALF
def test_logits_in_half_precision(backend: str, dtype: torch.dtype) -> None:
    """The RMS rule over 512 positions, prefilled in chunks and decoded."""
    prompt = [token for prompt in story_prompts(STORY_MODEL) for token in prompt][:449]
    engine = subject(backend, enforce_eager=True).engine(
        STORY_MODEL, num_blocks=64, max_num_batched_tokens=100, dtype=dtype
    )  # a recording would not show its logits
    output, recorder = record_alone(engine, prompt, greedy(64, ignore_eos=True))
    known = prompt + output[:-1]
    ours = recorder.logits_by_position(known)
    oracle.check_rms(torch.stack([ours[p] for p in range(len(known))]), STORY_MODEL, known, dtype, "cuda")


@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
def test_tight_quarters_in_fp32(checkpoints: Path, overlapped: bool) -> None:
    path = lively_qwen3(checkpoints)
    options = TIGHT | {"block_size": 16, "num_blocks": 5, "max_num_seqs": 6}
    engine = subject(async_scheduling=overlapped).engine(path, **options, dtype=torch.float32)
    outputs = engine.generate(PROMPTS, greedy(16, ignore_eos=True))
    oracle.check_greedy(path, PROMPTS, outputs, greedy(16, ignore_eos=True))


def test_seeded_tokens_do_not_depend_on_scheduling(checkpoints: Path) -> None:
    """The full and the plain tail, sync and async, alone and in a batch, and as on a CPU."""
    path = lively_qwen3(checkpoints)
    params = [
        SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.7, top_p=0.8, seed=2, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.2, top_k=9, repetition_penalty=1.3, seed=3, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    ]
    prompts = [{"prompt_token_ids": p} for p in PROMPTS[2:]]

    def tokens(device: str, overlapped: bool) -> list[list[int]]:
        llm = LLM(path, device=device, dtype="float32", async_scheduling=overlapped, skip_tokenizer_init=True,
                  num_kv_blocks=40, kvcache_block_size=16)  # fmt: skip
        together = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        alone = [
            llm.generate(p, s, use_tqdm=False)[0].outputs[0].token_ids for p, s in zip(prompts, params, strict=True)
        ]
        assert together == alone
        return together

    assert tokens("cuda", True) == tokens("cuda", False) == tokens("cpu", False)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_on_a_gpu_that_is_not_the_current_one(checkpoints: Path, eager: bool) -> None:
    """Also from another thread, which has a current one of its own; and two engines take turns."""
    options = {"dtype": "float32", "skip_tokenizer_init": True, "num_kv_blocks": 40, "kvcache_block_size": 16}
    engines = [LLM(lively_qwen3(checkpoints), device=f"cuda:{i}", enforce_eager=eager, **options) for i in (0, 1, 0)]
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True)
    prompts = [{"prompt_token_ids": p} for p in PROMPTS]

    def tokens(llm: LLM) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    with ThreadPoolExecutor() as threads:
        found = [tokens(llm) for llm in engines] + [threads.submit(tokens, llm).result() for llm in engines]
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_the_memory_limit_is_kept(share: float) -> None:
    """Weights, KV cache and the largest step together stay under gpu_memory_utilization."""
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    llm = LLM(STORY_MODEL, device="cuda", gpu_memory_utilization=share, max_num_seqs=64)
    assert llm.config.num_kv_blocks is not None and llm.config.num_kv_blocks > 100
    params = SamplingParams(temperature=0.5, max_tokens=32, ignore_eos=True, seed=0)
    torch.cuda.reset_peak_memory_stats()
    llm.generate([{"prompt_token_ids": list(range(1, 1001))}] * 64, params, use_tqdm=False)
    assert torch.cuda.max_memory_reserved() + others <= share * total * 1.01
    llm.close()
    del llm
    torch.cuda.empty_cache()


def test_too_little_memory_says_how_much_is_missing() -> None:
    with pytest.raises(ValueError, match=r"GiB are missing.*gpu_memory_utilization"):
        LLM(STORY_MODEL, device="cuda", gpu_memory_utilization=0.001)


def compiled() -> int:
    """How many variants of our kernels this process has compiled."""
    import triton

    import nanovllm.kernels as package

    found = 0
    for module in pkgutil.walk_packages(package.__path__, "nanovllm.kernels."):
        for kernel in vars(importlib.import_module(module.name)).values():
            if isinstance(kernel, triton.JITFunction) and hasattr(kernel, "device_caches"):
                found += sum(len(caches[0]) for caches in kernel.device_caches.values())
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_request_waits_for_a_compiler(dtype: str, checkpoints: Path) -> None:
    """Whole and cached prompts, short and long, alone and beside decodes: all that was compiled when it started."""
    with LLM(
        lively_qwen3(checkpoints), device="cuda", dtype=dtype, skip_tokenizer_init=True, kvcache_block_size=16,
        num_kv_blocks=400, max_num_seqs=64, max_num_batched_tokens=256,
    ) as llm:  # fmt: skip
        before = compiled()
        assert before > 10
        prompts = [[(7 * i + j) % 500 for j in range(n)] for i, n in enumerate([1, 2, 15, 16, 17, 40, 100, 300] * 6)]
        params = [SamplingParams(temperature=i % 2, max_tokens=1 + i % 9, ignore_eos=True) for i in range(len(prompts))]
        llm.generate(prompts, params, use_tqdm=False)
        llm.generate([[*prompt, 3, *[5] * (i % 11)] for i, prompt in enumerate(prompts)], params, use_tqdm=False)
        assert compiled() == before
