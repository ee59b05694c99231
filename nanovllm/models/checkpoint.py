"""A checkpoint in Hugging Face's layout: finding it, and reading what is in it except for the weights themselves."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
DESCRIPTION_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHT_FILES = ("*.safetensors",)


def find_checkpoint(model: str | Path, *, weights: bool = True) -> Path:
    """The directory of a checkpoint: `model` itself if it is a directory, else the downloaded snapshot of that hub id.

    The only place that uses the network. With weights=False the weights of a hub id are not fetched.
    Raises ValueError if there is no such directory and no such id.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model={str(model)!r}: no config.json in that directory, so it is not a checkpoint")
        return path
    name = str(model)
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"model={name!r} is neither a directory nor a hub id such as 'Qwen/Qwen3-0.6B'")
    return fetch(name, DESCRIPTION_FILES + (WEIGHT_FILES if weights else ()))


def fetch(hub_id: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download  # half a second, and most models are directories

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:  # the hub's own errors (no such repository, no network, bad id) are these
        raise ValueError(f"model={hub_id!r} is no directory here, and the hub did not give it: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__} where a JSON object is expected")
    return data


def weight_files(path: Path) -> dict[str, set[str] | None]:
    """The safetensors files of the checkpoint, each with the tensors to take from it (None: all that it has).

    Where there is an index, files and tensors that it does not name are not part of the model.
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
        outside = [file for file in files if Path(file).name != file]
        if outside:
            raise ValueError(f"{path / INDEX} names files outside its directory: {', '.join(outside)}")
        absent = [file for file in files if not (path / file).is_file()]
        if absent:
            raise ValueError(f"{path}: {', '.join(absent)}, named by {INDEX}, is missing; fetch the checkpoint again")
        return files
    found = sorted(file.name for file in path.glob("*.safetensors"))
    if "model.safetensors" in found:
        return {"model.safetensors": None}
    if len(found) > 1:
        raise ValueError(f"{path}: several weight files ({', '.join(found)}) and no {INDEX} that says what they hold")
    if not found:
        raise ValueError(f"{path}: no *.safetensors file; weights in other formats must be converted first")
    return {found[0]: None}


def read_eos_token_ids(path: Path) -> frozenset[int]:
    """Every token id that ends a text: those of generation_config.json and those of the tokenizer.

    Chat models have several (end of turn, end of text), and each file may know one that the other does not.
    config.json is asked only where there is no generation_config.json.
    """
    generation, config = path / "generation_config.json", path / "config.json"
    eos = read_json(generation if generation.is_file() else config).get("eos_token_id")
    ids = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    tokenizer = path / "tokenizer.json"
    if (path / "tokenizer_config.json").is_file() and tokenizer.is_file():
        eos_token = read_json(path / "tokenizer_config.json").get("eos_token")
        text = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
        added = read_json(tokenizer).get("added_tokens") or []
        ids.update(token["id"] for token in added if token["content"] == text)
    return frozenset(ids)
