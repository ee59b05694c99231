"""From a checkpoint in Hugging Face's layout (config.json, safetensors) to a model, strict about every tensor.

A loader that skips what it does not understand gives a model that runs and talks nonsense. This one refuses: an
unknown architecture, a missing, unexpected or misshapen tensor, a RoPE scaling it does not implement.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stages.model import ModelConfig, Transformer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODEL_TYPES = ("qwen3", "qwen2", "llama")


class LoadedModel(NamedTuple):
    model: Transformer
    config: ModelConfig  # its dtype is that of the loaded weights
    eos_token_ids: frozenset[int]
    path: Path


def load_model(
    model: str | Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    model_types: tuple[str, ...] = MODEL_TYPES,
    build: Callable[[ModelConfig], Transformer] = Transformer,
    windows: bool = False,
) -> LoadedModel:
    """Load a directory or a hub id such as "Qwen/Qwen3-0.6B" onto `device`, ready for inference.

    `dtype=None` keeps the checkpoint's dtype on a GPU and takes float32 on a CPU, where bf16 is slow and less exact.
    An elective has models of its own: `build` makes those of `model_types`, whose tensors are then as strictly checked.
    `windows`: whether the caller supports sliding windows; otherwise a model that has them is refused.
    Raises ValueError naming what is wrong with the path, the configuration, the weights or the device.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: this machine has no usable CUDA GPU; use device='cpu'")
    path = find_checkpoint(model)
    config = read_config(path, model_types, windows)
    if dtype is None:
        dtype = torch.float32 if torch.device(device).type == "cpu" else config.dtype
    config = replace(config, dtype=dtype)
    if config.tie_word_embeddings and has_own_head(path, dtype):
        config = replace(config, tie_word_embeddings=False)
    with torch.device("meta"):  # shapes without memory: every parameter is then replaced by the loaded tensor
        transformer = build(config)
    wanted = {name: tuple(p.shape) for name, p in transformer.named_parameters()}
    tensors: dict[str, Tensor] = {}
    unexpected, misshapen = [], []
    for name, tensor in read_tensors(path):
        ours = parameter_of(name, config)
        if name.endswith("rotary_emb.inv_freq"):
            continue  # the frequencies are computed
        if ours not in wanted:
            unexpected.append(name)
        elif tuple(tensor.shape) != wanted[ours]:
            misshapen.append(f"{name} is {tuple(tensor.shape)}, config.json implies {wanted[ours]}")
        else:
            tensors[ours] = tensor.to(device=device, dtype=dtype)
    missing = wanted.keys() - tensors.keys() - {m.split(" ")[0].removeprefix("model.") for m in misshapen}
    if missing or unexpected or misshapen:
        raise ValueError(
            f"the weights in {path} do not fit its config.json: missing {sorted(missing)}, "
            f"unexpected {sorted(unexpected)}, wrong shape {misshapen}"
        )
    transformer.load_state_dict(tensors, assign=True)
    transformer.requires_grad_(False)
    return LoadedModel(transformer.eval(), config, read_eos_token_ids(path), path)


def parameter_of(name: str, config: ModelConfig) -> str:
    """What a tensor of the checkpoint is in the model. A tied head is the embedding, which the file may leave out."""
    is_tied_head = name == "lm_head.weight" and config.tie_word_embeddings
    return "embed_tokens.weight" if is_tied_head else name.removeprefix("model.")


def find_checkpoint(model: str | Path) -> Path:
    """A directory as it is; a hub id through `huggingface_hub`, the only place that uses the network."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model={str(model)!r}: the directory has no config.json, so it is not a checkpoint")
        return path
    if path.exists() or str(model).count("/") != 1 or str(model).startswith((".", "/", "~")):
        raise ValueError(f"model={str(model)!r} is neither a directory nor a hub id such as 'Qwen/Qwen3-0.6B'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(model), allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"model={str(model)!r} is no directory here and could not be fetched: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return data
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def read_config(path: Path, model_types: tuple[str, ...] = MODEL_TYPES, windows: bool = False) -> ModelConfig:
    """config.json in the spelling of transformers 4 (rope_theta, torch_dtype) or 5 (rope_parameters, dtype)."""
    raw = read_json(path / "config.json")
    kind = raw.get("model_type")
    if kind not in model_types:
        raise ValueError(f"{path}: model_type {kind!r} is not supported; supported are {', '.join(model_types)}")
    kind = kind.removesuffix("_moe")  # a mixture of experts is its family's model but for the MLPs
    needed = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    absent = [key for key in needed if key not in raw]
    if absent:
        raise ValueError(f"{path}: config.json lacks {', '.join(absent)}")
    rope = raw.get("rope_parameters") or {}
    for said in (rope, raw.get("rope_scaling") or {}):  # both, where somebody has added a scaling by hand
        scaling = said.get("rope_type", said.get("type", "default"))
        if scaling != "default":
            raise ValueError(f"{path}: RoPE scaling {scaling!r} is not supported; only models without scaling are")
    limited = raw.get("use_sliding_window") and raw.get("sliding_window", 4096) is not None and kind != "llama"
    first = raw.get("max_window_layers", 28) if limited else raw["num_hidden_layers"]
    if not windows and "sliding_attention" in (
        raw.get("layer_types") or ["sliding_attention"] * (raw["num_hidden_layers"] - first)
    ):
        raise ValueError(f"{path}: sliding-window attention is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported; only 'silu' is")
    dtype_name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype_name not in DTYPES:
        raise ValueError(f"{path}: dtype {dtype_name!r} is not supported; supported are {', '.join(DTYPES)}")
    if not raw.get("is_causal", True):  # an embedding model, whose tokens see later ones; the weights do not show it
        raise ValueError(f"{path}: is_causal={raw['is_causal']!r} is not supported; choose a causal model")
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(f"{path}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    # What a family leaves out of config.json means something else in each
    attention_bias = bool(raw.get("attention_bias", kind == "qwen2"))
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=raw.get("head_dim") or (128 if kind == "qwen3" else raw["hidden_size"] // heads),
        max_position_embeddings=raw.get("max_position_embeddings", 2048 if kind == "llama" else 32768),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=kind == "qwen3",
        qkv_bias=True if kind == "qwen2" else attention_bias,
        o_bias=False if kind == "qwen2" else attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) and kind == "llama",
        dtype=DTYPES[dtype_name],
    )


def has_own_head(path: Path, dtype: torch.dtype) -> bool:
    """Whether a model that calls itself tied brings another head: as Hugging Face does, the file is then believed."""
    both = dict(read_tensors(path, {"lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight"}))
    return len(both) == 2 and not torch.equal(*(tensor.to(dtype) for tensor in both.values()))


def read_tensors(path: Path, only: set[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint, or those named in `only`, one at a time. An index, where there is one, decides
    which file holds what. An index that does not name an existing model.safetensors is a leftover, and is ignored."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    weight_map: dict[str, str] = read_json(index)["weight_map"] if index.is_file() else {}
    if single.is_file() and single.name not in weight_map.values():
        weight_map = {}
    if weight_map:
        files = sorted(set(weight_map.values()))
    elif single.is_file():
        files = [single.name]  # others beside it are strays (an adapter, the original format)
    else:
        files = sorted(f.name for f in path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path}: no *.safetensors file, so there are no weights to load")
    absent = [f for f in files if not (path / f).is_file()]
    if absent:
        raise ValueError(f"{path}: the index names {', '.join(absent)}, which is not there; fetch it again")
    for file in files:
        try:
            with safe_open(path / file, framework="pt") as reader:
                names = set(reader.keys()) & (only or set(reader.keys()))
                for name in sorted(weight_map) if weight_map else sorted(names):
                    if weight_map.get(name, file) == file and name in names:
                        yield name, reader.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path / file} is damaged or cut short ({error}); fetch it again") from error


def read_eos_token_ids(path: Path) -> frozenset[int]:
    """Every id that ends a text: the union of what generation_config.json and the tokenizer say.

    Instruction models list several (end of turn, end of text); stopping at only one of them rambles on. config.json is
    asked where there is no generation_config.json.
    """
    generation = path / "generation_config.json"
    said = read_json(generation if generation.is_file() else path / "config.json").get("eos_token_id")
    ids = {said} if isinstance(said, int) else set(said or ())
    if (path / "tokenizer.json").is_file():
        eos = tokenizer_eos(path)
        ids |= set() if eos is None else {eos}
    return frozenset(ids)


def tokenizer_eos(path: Path) -> int | None:
    """The id of the tokenizer's EOS token. Hugging Face's class knows it, but takes a second to import; so the usual
    case is read here: tokenizer_config.json names a token that tokenizer.json lists as an added one."""
    file = path / "tokenizer_config.json"
    said = read_json(file) if file.is_file() else {}
    added = {token["content"]: token["id"] for token in read_json(path / "tokenizer.json").get("added_tokens", [])}
    if "added_tokens_decoder" in said:  # where both files list the added tokens, they must agree
        listed = {token["content"]: int(i) for i, token in said["added_tokens_decoder"].items()}
        added = added if added == listed else {}
    if "eos_token" in said and ("added_tokens_decoder" in said or not (path / "special_tokens_map.json").is_file()):
        eos = said["eos_token"]["content"] if isinstance(said["eos_token"], dict) else said["eos_token"]
        if eos is None or eos in added:
            return added.get(eos)
    from transformers import AutoTokenizer

    found: int | None = AutoTokenizer.from_pretrained(path, trust_remote_code=False).eos_token_id
    return found
