"""What was taken from which file of a checkpoint, as `nanovllm info` shows it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanovllm.models.checkpoint import GENERATION_CONFIG, read_eos_token_ids, read_json, read_sampling_defaults
from nanovllm.models.config import read_config
from nanovllm.text.tokenizer import Tokenizer

Fact = tuple[str, str, str]  # name, value, the file that says so


def checkpoint_facts(path: Path) -> list[Fact]:
    """Whatever changes an answer. Raises ValueError for a config.json that is not supported."""
    raw, config, generation = read_json(path / "config.json"), read_config(path), path / GENERATION_CONFIG

    def said(*keys: str) -> str:
        """Where config.json says it: the first of these keys that has a value."""
        found = [key for key in keys if raw.get(key) is not None]
        return f"config.json: {found[0]}" if found else "the default"

    scaling = config.rope_scaling
    kind = "none" if scaling is None else ", ".join([type(scaling).__name__, *numbers(scaling)])
    eos_file = GENERATION_CONFIG if generation.is_file() else "config.json"
    facts = [
        ("architecture", raw["model_type"], "config.json: model_type"),
        ("dtype of the weights", str(config.dtype).removeprefix("torch."), said("dtype", "torch_dtype")),
        ("positions", str(config.max_position_embeddings), said("max_position_embeddings")),
        ("RoPE theta", f"{config.rope_theta:g}", said("rope_parameters", "rope_theta")),
        ("RoPE scaling", kind, said("rope_parameters", "rope_scaling")),
        ("tied embeddings", "yes" if config.tie_word_embeddings else "no", said("tie_word_embeddings")),
        ("EOS ids", ", ".join(map(str, sorted(read_eos_token_ids(path)))) or "none", eos_file),
        *tokenizer_facts(path),
    ]
    defaults = read_sampling_defaults(path)
    facts += [(f"default {name}", str(value), GENERATION_CONFIG) for name, value in defaults.items()]
    return facts if defaults else [*facts, ("sampling defaults", "none", "SamplingParams")]


def tokenizer_facts(path: Path) -> list[Fact]:
    try:
        tokenizer = Tokenizer(path)
    except ValueError as error:
        return [("tokenizer", "none", str(error))]
    hf, files = tokenizer.hf, [file.name for file in sorted(path.glob("*token*.json"))]
    config = "tokenizer_config.json" if "tokenizer_config.json" in files else "the class"
    eos = "none" if hf.eos_token is None else f"{hf.eos_token} ({hf.eos_token_id})"
    template = "none" if not hf.chat_template else f"{len(str(hf.chat_template))} characters"
    jinja = sorted(file.name for file in path.glob("chat_template*"))
    before = tokenizer.decode(tokenizer.encode("x"), skip_special_tokens=False)
    return [
        ("tokenizer", f"{type(hf).__name__}, {len(hf)} tokens", ", ".join(files)),
        ("the text 'x' becomes", repr(before), "tokenizer.json"),
        ("EOS of the tokenizer", eos, "special_tokens_map.json" if names_eos(path) else config),
        ("chat template", template, jinja[0] if jinja else config),
    ]


def names_eos(path: Path) -> bool:
    """Whether special_tokens_map.json has the say: where tokenizer_config.json lists no added tokens."""
    file, config = path / "special_tokens_map.json", path / "tokenizer_config.json"
    listed = config.is_file() and "added_tokens_decoder" in read_json(config)
    return file.is_file() and not listed and read_json(file).get("eos_token") is not None


def numbers(scaling: Any) -> list[str]:
    return [f"{name} {value}" for name, value in asdict(scaling).items() if name != "theta"]
