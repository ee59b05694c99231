"""What was taken from which file of a checkpoint, as `nanovllm info` shows it."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.models.checkpoint import (
    GENERATION_CONFIG,
    OF_THE_WHOLE,
    SAMPLING_DEFAULTS,
    WITH_IMAGES,
    dtype_of_weights,
    generation_file,
    read_eos_token_ids,
    read_json,
    read_sampling_defaults,
    read_text_config,
    weight_files,
)
from nanovllm.models.config import ModelConfig, read_config
from nanovllm.models.families import FAMILIES, Family
from nanovllm.models.loader import HEAD, has_own_head
from nanovllm.models.window_config import FULL, LIMITED
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.text.tokenizer_class import read

Fact = tuple[str, str, str]  # name, value, the file that says so


def checkpoint_facts(path: Path) -> list[Fact]:
    """Whatever changes an answer. Raises ValueError for a config.json that is not supported."""
    raw, config, said = read_text_config(path), read_config(path), partial(place, path)

    def recommended(key: str) -> str:
        file = generation_file(path).name
        return f"{file}: {key}" if file == GENERATION_CONFIG else said(key, default=f"{file}: {key}")

    scaling = config.rope_scaling
    kind = "none" if scaling is None else ", ".join([type(scaling).__name__, *numbers(scaling)])
    without_scaling = raw.get("max_position_embeddings") or FAMILIES[raw["model_type"]].max_position_embeddings
    is_longer = config.max_position_embeddings > without_scaling
    positions = ("rope_parameters", "rope_scaling") if is_longer else ("max_position_embeddings",)
    eos = ", ".join(map(str, sorted(read_eos_token_ids(path)))) or "none"
    facts = [
        ("architecture", raw["model_type"], said("model_type", default="config.json: model_type")),
        (
            "dtype of the weights",
            str(config.dtype).removeprefix("torch."),
            dtype_place(path, raw, said("dtype", "torch_dtype")),
        ),
        *quantization_fact(config, said),
        ("vocabulary of the model", f"{config.vocab_size} rows", said("vocab_size")),
        ("positions", str(config.max_position_embeddings), said(*positions)),
        ("RoPE theta", thetas(config), theta_place(raw, said)),
        ("RoPE scaling", kind, said("rope_parameters", "rope_scaling")),
        *window_facts(config, said),
        head_fact(path, config, said("tie_word_embeddings")),
        *expert_facts(config, said, FAMILIES[raw["model_type"]]),
        ("EOS ids of the model", eos, recommended("eos_token_id")),
        *tokenizer_facts(path),
    ]
    defaults = read_sampling_defaults(path)
    keys = {name: key for key, name in SAMPLING_DEFAULTS.items()}
    facts += [(f"default {name}", str(value), recommended(keys[name])) for name, value in defaults.items()]
    return facts if defaults else [*facts, ("sampling defaults", "none", "SamplingParams")]


def place(path: Path, *keys: str, default: str = "the default") -> str:
    """Where config.json says it: the first of these keys that has a value. In the file of a model that also reads
    images, the key is in `text_config` or beside it."""
    whole = read_json(path / "config.json")
    text = whole["text_config"] if whole.get("model_type") in WITH_IMAGES else None
    for key in keys:
        if (text is None or key in OF_THE_WHOLE) and whole.get(key) is not None:
            return f"config.json: {key}"
        if text is not None and key != "tie_word_embeddings" and text.get(key) is not None:
            return f"config.json: text_config.{key}"
    return default


def dtype_place(path: Path, raw: dict[str, Any], said: str) -> str:
    by_weights = said == "the default" or raw[said.rpartition(": ")[2].removeprefix("text_config.")] == "auto"
    return said if not by_weights or dtype_of_weights(path) is None else "the weights"


def thetas(config: ModelConfig) -> str:
    local = "" if config.gemma is None else f", {config.gemma.local_rope_theta:g} in layers with a window"
    return f"{config.rope_theta:g}{local}"


def theta_place(raw: dict[str, Any], said: Callable[..., str]) -> str:
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key) or {}
        if rope.get("rope_theta", rope.get(FULL, rope.get(LIMITED))) is not None:
            return said(key)
    return said("rope_theta")


def head_fact(path: Path, config: ModelConfig, source: str) -> Fact:
    """A head that is not the embedding is used, whatever config.json says."""
    has_weights = config.tie_word_embeddings and any(path.glob("*.safetensors"))
    if has_weights and has_own_head(path, weight_files(path), config.dtype):
        return "tied embeddings", "no", f"the weights: {HEAD}"
    return "tied embeddings", "yes" if config.tie_word_embeddings else "no", source


def quantization_fact(config: ModelConfig, said: Callable[..., str]) -> list[Fact]:
    if config.quantization is None:
        return []
    block = config.quantization.block
    scales = "output channel" if block is None else "block of {} x {}".format(*block)
    return [("quantised weights", f"FP8, a scale per {scales}", said("quantization_config"))]


def window_facts(config: ModelConfig, said: Callable[..., str]) -> list[Fact]:
    """The fact on sliding windows; nothing if every layer sees the whole text."""
    limited = [window for window in config.windows if window]
    if not limited:
        return []
    value = f"{limited[0]} tokens in {len(limited)} of {len(config.windows)} layers"
    return [("sliding window", value, said("sliding_window"))]


def expert_facts(config: ModelConfig, said: Callable[..., str], family: Family) -> list[Fact]:
    moe, keys = config.moe, family.experts
    if moe is None or keys is None:
        return []
    shared = ", and a shared one" if moe.shared_intermediate_size else ""
    chosen = f"{moe.num_experts_per_tok} of {moe.num_experts} per token{shared}"
    weights = "shares of their sum" if moe.norm_topk_prob else "probabilities"
    source = "the architecture" if keys.norm_topk_prob is not None else said("norm_topk_prob")
    return [("experts", chosen, said("num_experts_per_tok")), ("weights of the experts", weights, source)]


def tokenizer_facts(path: Path) -> list[Fact]:
    try:
        tokenizer = Tokenizer(path)
    except ValueError as error:
        return [("tokenizer", "none", str(error))]
    hf, config = tokenizer.hf, read(path / "tokenizer_config.json")
    # Where tokenizer_config.json lists the added tokens, Hugging Face reads no older file.
    older = () if "added_tokens_decoder" in config else ("special_tokens_map.json", "added_tokens.json")
    files = [name for name in ("tokenizer.json", "tokenizer_config.json", *older) if (path / name).is_file()]
    said = {name: read(path / name) for name in files}
    places = [
        name for name in ("special_tokens_map.json", "tokenizer_config.json") if "eos_token" in said.get(name, {})
    ]
    eos = "none" if hf.eos_token is None else f"{hf.eos_token} ({hf.eos_token_id})"
    around = tokenizer.decode(tokenizer.encode("x"), skip_special_tokens=False)
    return [
        ("tokenizer", f"{type(hf).__name__}, {len(hf)} tokens", ", ".join(files)),
        ("the text 'x' becomes", repr(around), ", ".join(files[:2])),
        ("EOS of the tokenizer", eos, f"{places[0]}: eos_token" if places else f"the default of {type(hf).__name__}"),
        template_fact(path, hf.chat_template),
    ]


def template_fact(path: Path, templates: str | dict[str, str] | None) -> Fact:
    files = [name for name in ("chat_template.jinja", "additional_chat_templates") if (path / name).exists()]
    named = templates if isinstance(templates, dict) else {"default": templates} if templates else {}
    others = ", ".join(sorted(named.keys() - {"default", "tool_use"}))
    value = f"{len(named['default'])} characters" if "default" in named else "none"
    value += f", with tools {len(named['tool_use'])} characters" if "tool_use" in named else ""
    source = (files or ["tokenizer_config.json: chat_template"])[0] if named else "no file"
    return "chat template", value + (f" (not used: {others})" if others else ""), source


def numbers(scaling: Any) -> list[str]:
    return [f"{name} {value}" for name, value in asdict(scaling).items() if name != "theta"]
