"""The engine's configuration: the field's names and defaults (DESIGN 4), checked when made."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

logger = logging.getLogger(__name__)

DEFAULT_MAX_MODEL_LEN = 4096
MAX_GUESSES = 256  # of a sequence in a step, and tokens of an n-gram


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How tokens are guessed ahead: by a smaller model, or by looking for the last n tokens in the text so far."""

    method: Literal["draft", "ngram"]
    k: int  # the most tokens to guess in a step
    model: str | Path | None = None  # of "draft"
    n: int = 0  # of "ngram"

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> "Speculation":
        """From {"model": path, "k": 4} or {"method": "ngram", "k": 4, "n": 3}, both numbers optional.

        Raises ValueError for what makes no sense, and TypeError for what is no mapping.
        """
        shapes = '{"model": path, "k": 4} or {"method": "ngram", "k": 4, "n": 3}'
        if not isinstance(options, Mapping):
            raise TypeError(f"speculative must be a dict like {shapes}; got {options!r}")
        method = options.get("method", "draft")
        if method not in ("draft", "ngram"):
            raise ValueError(f"speculative['method'] must be 'draft' or 'ngram'; got {method!r}")
        defaults = {"method": method, "k": 4} | ({"n": 3} if method == "ngram" else {"model": None})
        if unknown := sorted(map(str, options.keys() - defaults.keys())):
            raise ValueError(f"speculative has no key {unknown[0]!r} for {method!r}; give {shapes}")
        values: dict[str, Any] = defaults | dict(options)
        for name in ("k", "n") if method == "ngram" else ("k",):
            if type(values[name]) is not int or not 1 <= values[name] <= MAX_GUESSES:
                raise ValueError(
                    f"speculative[{name!r}] must be an integer from 1 to {MAX_GUESSES}; got {values[name]!r}"
                )
        if method == "draft" and not values["model"]:
            raise ValueError(f"speculative needs the draft's 'model'; give {shapes}")
        if not isinstance(values.get("model"), str | Path | None):
            raise TypeError(f"speculative['model'] must be a directory or a hub id; got {values['model']!r}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All knobs of one engine. `None` means "found out while loading": see `resolve`.

    max_num_batched_tokens:  token budget of a step.
    max_num_seqs:            sequences that run at once; the rest waits.
    max_model_len:           prompt and output of one sequence together; None is 4096, or the model's own if smaller.
    kvcache_block_size:      tokens of a KV block; None is 256 on a GPU and 16 on a CPU.
    num_kv_blocks:           blocks of the KV pool; None means measured from the free memory.
    gpu_memory_utilization:  share of the GPU's memory for weights, activations and KV cache together.
    kv_cache_gib:            size of the KV cache on a CPU, in GiB.
    enable_prefix_caching:   sequences share the blocks of equal beginnings.
    enable_chunked_prefill:  a prompt may be computed over several steps. Off, it must fit max_num_batched_tokens;
                             only a sequence resumed after a preemption is then computed in chunks.
    async_scheduling:        plan a step while the one before it runs; None is on for a GPU and off for a CPU.
    tensor_parallel_size:    ranks that share each layer.
    enable_expert_parallel:  each rank has whole experts, and not a part of every expert. For mixtures of experts only.
    enforce_eager:           no CUDA graphs.
    speculative:             guess tokens ahead and verify them together: see `Speculation.parse`.
    attention_backend:       "auto" chooses by device.
    kv_cache_dtype:          "fp8" (or "fp8_e4m3", the same) keeps keys and values in FP8, which takes half the memory
                             of 16 bits. "auto" keeps them in `dtype`.
    dtype:                   "auto" is the checkpoint's on a GPU and float32 on a CPU. "half" is float16, "float" is
                             float32.
    load_format:             "dummy" fills the weights at random, for benchmarks.
    quantization:            "fp8" quantises linear layers and experts while they are loaded; see `models/loader.py`.
                             None leaves them as the checkpoint has them, which may be in FP8 already. In either case
                             a draft model's weights stay as its own checkpoint has them.
    generation_config:       "auto" takes the sampling defaults of the checkpoint's generation_config.json, where a
                             request says nothing; "vllm" takes those of `SamplingParams`. EOS ids count either way.
    seed:                    where the seeds of unseeded requests come from; None is the operating system.
    """

    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int | None = None
    kvcache_block_size: int | None = None
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float = 1.0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    async_scheduling: bool | None = None
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enforce_eager: bool = False
    speculative: Mapping[str, Any] | None = None
    device: str | None = None
    dtype: str = "auto"
    attention_backend: Literal["auto", "torch_ref", "triton", "flash_attn"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    quantization: Literal["fp8"] | None = None
    generation_config: Literal["auto", "vllm"] = "auto"
    seed: int | None = None

    def __post_init__(self) -> None:
        counts = "max_num_batched_tokens", "max_num_seqs", "max_model_len", "kvcache_block_size", "num_kv_blocks"
        for name in (*counts, "tensor_parallel_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise TypeError(f"{name} must be int; got {value!r}")
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value!r}")
        if self.max_model_len == 1:
            raise ValueError("max_model_len must be at least 2, a token of prompt and one of output; got 1")
        for name in ("gpu_memory_utilization", "kv_cache_gib"):
            if not isinstance(value := getattr(self, name), int | float) or isinstance(value, bool):
                raise TypeError(f"{name} must be a number; got {value!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1]; got {self.gpu_memory_utilization!r}")
        if not 0 < self.kv_cache_gib < math.inf:
            raise ValueError(f"kv_cache_gib must be a positive number of GiB; got {self.kv_cache_gib!r}")
        switches = "enable_prefix_caching", "enable_chunked_prefill", "enable_expert_parallel", "enforce_eager"
        for name in (*switches, "async_scheduling"):
            value, may_be_open = getattr(self, name), name == "async_scheduling"
            if not isinstance(value, bool) and not (value is None and may_be_open):
                raise TypeError(f"{name} must be True or False{', or None' if may_be_open else ''}; got {value!r}")
        if self.seed is not None and type(self.seed) is not int:
            raise TypeError(f"seed must be an integer or None; got {self.seed!r}")
        for short, name in ("half", "float16"), ("float", "float32"):
            if self.dtype == short:
                object.__setattr__(self, "dtype", name)
        for name, known in (
            ("dtype", ("auto", "float32", "bfloat16", "float16")),
            ("attention_backend", ("auto", "torch_ref", "triton", "flash_attn")),
            ("kv_cache_dtype", ("auto", "fp8", "fp8_e4m3")),
            ("load_format", ("auto", "dummy")),
            ("quantization", (None, "fp8")),
            ("generation_config", ("auto", "vllm")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(str, known))}; got {getattr(self, name)!r}")
        if self.speculation is not None and self.async_scheduling:
            raise ValueError(
                "async_scheduling=True does not go with speculative, where the length of a step's output is known only "
                "when it is over; leave one of them out"
            )

    @property
    def fp8_kv_cache(self) -> bool:
        return self.kv_cache_dtype != "auto"

    @property
    def speculation(self) -> Speculation | None:
        return None if self.speculative is None else Speculation.parse(self.speculative)

    def resolve(self, *, on_gpu: bool, model_max_len: int) -> "EngineConfig":
        """The same configuration with the defaults that depend on device and model filled in.

        Only `num_kv_blocks` may still be None afterwards: it is known when the model is loaded. Raises ValueError for a
        `max_model_len` beyond the model's.
        """
        if self.max_model_len is not None and self.max_model_len > model_max_len:
            whose = "model and draft both have," if "model" in (self.speculative or {}) else "the model's"
            raise ValueError(
                f"max_model_len={self.max_model_len} is more than {whose} {model_max_len}; lower it or leave it out"
            )
        overlapped = on_gpu if self.async_scheduling is None else self.async_scheduling
        if self.speculative is not None:
            overlapped = False
            logger.info("speculative: async_scheduling=False, since a step's output may have any length")
        return replace(
            self,
            max_model_len=self.max_model_len or min(DEFAULT_MAX_MODEL_LEN, model_max_len),
            kvcache_block_size=self.kvcache_block_size or (256 if on_gpu else 16),
            async_scheduling=overlapped,
        )
