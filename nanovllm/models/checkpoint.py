"""A checkpoint in Hugging Face's layout: finding it, and reading what is in it except for the weights themselves."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
WEIGHTS, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
OTHER_FORMATS = "other formats (GGUF, .bin) must be converted first, and a LoRA adapter merged into its base model"
DESCRIPTION_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHT_FILES = ("*.safetensors",)
MAX_HEADER = 100 << 20  # bytes that safetensors allows before the tensors of a file
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float32"}
# Models that also read images, with the defaults of their `text_config`, which describes the text model
WITH_IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {"model_type": "gemma3_text", "vocab_size": 262208, "num_attention_heads": 8},
    "mistral3": {"model_type": "mistral"},
}
# Keys that may stand beside the `text_config`, and override it
OF_THE_WHOLE = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings", "eos_token_id")
# What is taken of it, with its name in `SamplingParams`; and what is not, and its "off".
SAMPLING_DEFAULTS = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
SAMPLING_DEFAULTS["max_new_tokens"] = "max_tokens"
NOT_SUPPORTED = {
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "bad_words_ids": [],
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": {},
    "guidance_scale": 1.0,
    "stop_strings": [],
    "penalty_alpha": 0.0,
    "top_h": None,
    "exponential_decay_length_penalty": None,
    "force_words_ids": [],
    "dola_layers": None,
    "watermarking_config": None,
}


def find_checkpoint(model: str | Path, *, weights: bool = True) -> Path:
    """The directory of a checkpoint: `model` itself if it is a directory, else the downloaded snapshot of that hub id.

    The only place that uses the network. With weights=False the weights of a hub id are not fetched.
    Raises ValueError if there is no such directory and no such id, or if it has no config.json.
    """
    return local_checkpoint(model) or fetch(str(model), DESCRIPTION_FILES + (WEIGHT_FILES if weights else ()))


def local_checkpoint(model: str | Path) -> Path | None:
    """`model` if it is a directory with a checkpoint; None if it may be a hub id.

    Raises ValueError if it is neither, and TypeError if it is no text or path.
    """
    if not isinstance(model, str | Path):
        raise TypeError(f"model must be a directory or a hub id; got {model!r}")
    path = Path(model).expanduser()
    if path.is_dir():
        return with_config(path, str(model))
    name = str(model)
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"model={name!r} is neither a directory nor a hub id such as 'Qwen/Qwen3-0.6B'")
    return None


def fetch(hub_id: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download  # half a second, and most models are directories

    try:
        path = Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:  # the hub's own errors (no such repository, no network, bad id) are these
        raise ValueError(f"model={hub_id!r} is no directory here, and the hub did not give it: {error}") from error
    return with_config(path, hub_id)


def with_config(path: Path, model: str) -> Path:
    """`path`, the directory of `model`. Raises ValueError if it has no config.json."""
    if not (path / "config.json").is_file():
        raise ValueError(f"model={model!r}: no config.json there, so it is not a checkpoint; {OTHER_FORMATS}")
    return path


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__} where a JSON object is expected")
    return data


def read_text_config(path: Path) -> dict[str, Any]:
    """What config.json says of the text model: all of it, unless the model also reads images.

    Raises ValueError for a file that is not a JSON object, and for a model that reads images but has no `text_config`.
    """
    raw = read_json(path / "config.json")
    if (defaults := WITH_IMAGES.get(str(raw.get("model_type")))) is None:
        return raw
    if not isinstance(raw.get("text_config"), dict):
        raise ValueError(
            f"{path / 'config.json'}: model_type={raw['model_type']!r} needs a text_config; fetch it again"
        )
    whole = {key: raw[key] for key in OF_THE_WHOLE if raw.get(key) is not None}
    return {**defaults, **raw["text_config"], "tie_word_embeddings": True, **whole}


def weight_files(path: Path) -> dict[str, set[str] | None]:
    """The safetensors files of the checkpoint, each with the tensors to take from it (None: all that it has).

    Where there is an index, files and tensors that it does not name are not part of the model. But as in Hugging Face,
    an index that does not name an existing model.safetensors is a leftover, and is ignored.
    Raises ValueError if a file that the index names, or every weight file, is missing.
    """
    if (path / INDEX).is_file():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{path / INDEX} has no weight_map, so it does not say which file holds which tensor")
        files: dict[str, set[str] | None] = {
            file: {name for name, holder in weight_map.items() if holder == file}
            for file in sorted(set(map(str, weight_map.values())))
        }
        if WEIGHTS not in files and (path / WEIGHTS).is_file():
            return {WEIGHTS: None}
        outside = [file for file in files if Path(file).name != file]
        if outside:
            raise ValueError(f"{path / INDEX} names files outside its directory: {', '.join(outside)}")
        absent = [file for file in files if not (path / file).is_file()]
        if absent:
            raise ValueError(f"{path}: {', '.join(absent)}, named by {INDEX}, is missing; fetch the checkpoint again")
        return files
    found = sorted(file.name for file in path.glob("*.safetensors") if file.name != ADAPTER)
    if WEIGHTS in found:
        return {WEIGHTS: None}
    if len(found) > 1:
        raise ValueError(f"{path}: several weight files ({', '.join(found)}) and no {INDEX} that says what they hold")
    if not found:
        raise ValueError(f"{path}: no *.safetensors file with the model's weights; {OTHER_FORMATS}")
    return {found[0]: None}


def dtype_of_weights(path: Path) -> str | None:
    """The dtype of the first floating-point tensor, where Hugging Face looks if config.json names no dtype; float32 for
    float64. None where there are no weights that can be read."""
    try:
        with open(path / next(iter(weight_files(path))), "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, MAX_HEADER)))
        dtypes = [tensor["dtype"] for name, tensor in sorted(header.items()) if name != "__metadata__"]
        return next((DTYPE_NAMES[dtype] for dtype in dtypes if dtype in DTYPE_NAMES), None)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # reading the weights will tell what is wrong with them


def generation_file(path: Path) -> Path:
    """The file that says how to generate: generation_config.json, or config.json where there is no such file."""
    file = path / GENERATION_CONFIG
    return file if file.is_file() else path / "config.json"


def read_generation(path: Path) -> dict[str, Any]:
    """What the `generation_file` says; of config.json, what it says of the text model."""
    file = generation_file(path)
    return read_json(file) if file.name == GENERATION_CONFIG else read_text_config(path)


def read_eos_token_ids(path: Path) -> frozenset[int]:
    """Every token id that ends a text, as the `generation_file` says.

    A tokenizer may know one more: see `Tokenizer.eos_token_id`.
    """
    file, eos = generation_file(path), read_generation(path).get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(i) is int for i in ids):  # true is no id
        raise ValueError(f"{file}: eos_token_id must be a token id or a list of them; got {eos!r}")
    return frozenset(ids)


def read_sampling_defaults(path: Path) -> dict[str, Any]:
    """The sampling parameters that the `generation_file` recommends, by their names in `SamplingParams`.

    As in vLLM, `do_sample` has no say: who names a temperature means it. What else would change a text, and is not
    supported, is named in a warning.
    """
    file = generation_file(path)
    said = {key: value for key, value in read_generation(path).items() if value is not None}
    ignored = [key for key, off in NOT_SUPPORTED.items() if said.get(key, off) != off]
    if ignored:
        logger.warning("%s: %s: not supported, and ignored", file, ", ".join(ignored))
    return {name: said[key] for key, name in SAMPLING_DEFAULTS.items() if key in said}
