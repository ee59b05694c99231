"""Which of Hugging Face's tokenizer classes reads a checkpoint: the choice of `AutoTokenizer`, without its torch.

A class may do more than read tokenizer.json. Llama's and Qwen2's, for example, take only vocabulary and merges from
there, and bring their own rules for splitting a text. So the class is part of what the files say. `AutoTokenizer`
itself costs two seconds and imports torch, because it can make models, too. A test compares the two choices.
"""

import json
import warnings
from pathlib import Path
from typing import Any

# By the `model_type` of config.json: the class that Hugging Face has for this family, where it has one.
OF_FAMILY = {
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen2_moe": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "gemma3": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "mistral": "TokenizersBackend",
    "mistral3": "TokenizersBackend",
    "ministral": "TokenizersBackend",
    "mixtral": "TokenizersBackend",
}
# Families whose class reads all their checkpoints, whatever these say: many say something wrong.
ALWAYS_OF_FAMILY = {"qwen2", "mistral", "mistral3", "ministral", "mixtral"}
PLAIN = {"TokenizersBackend", "PreTrainedTokenizer", "PythonBackend"}  # what tokenizer.json says, and nothing else


def tokenizer_class(path: Path) -> Any:
    """The class for the directory `path`, a subclass of `PreTrainedTokenizerFast`.

    Raises ValueError if only code that comes with the checkpoint, which is never run, or a class without a
    tokenizer.json could read it.
    """
    # Of tqdm, in a notebook; there is no bar to be shown. (`catch_warnings` is not for threads, and this may be one.)
    warnings.filterwarnings("ignore", "IProgress not found")
    import transformers  # a second, and token ids need none of it

    plain = transformers.PreTrainedTokenizerFast
    name = class_name(path)
    found = plain if name in PLAIN else getattr(transformers, name, None) or getattr(transformers, name + "Fast", plain)
    if not (isinstance(found, type) and issubclass(found, plain)):
        raise ValueError(
            f"{path}: tokenizer_class={name!r} does not read a tokenizer.json; pass token ids with "
            "skip_tokenizer_init=True"
        )
    return found


def class_name(path: Path) -> str:
    """The name of the class, without "Fast" at its end."""
    config, tokenizer_config = read(path / "config.json"), read(path / "tokenizer_config.json")
    family = str(config.get("model_type"))
    own, of_family = code_of_its_own(tokenizer_config), OF_FAMILY.get(family, "")
    said = tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class") or ""
    if not isinstance(said, str):
        raise ValueError(f"{path}: tokenizer_class must be the name of a class; got {said!r}; mend it, or leave it out")
    declared = short(said)
    if family in ALWAYS_OF_FAMILY and not own:
        return of_family
    if own and not of_family and not is_known(declared):
        raise ValueError(
            f"{path}: the tokenizer needs {own} (auto_map), code that comes with the checkpoint and is never run; pass "
            "token ids with skip_tokenizer_init=True"
        )
    if declared == "LlamaTokenizer" and not own and b'"ByteLevel"' in (path / "tokenizer.json").read_bytes():
        return "TokenizersBackend"  # Llama 3, whose checkpoints name the class of Llama 2
    return declared or of_family or "TokenizersBackend"


def short(name: str) -> str:
    return "TokenizersBackend" if name == "PreTrainedTokenizerFast" else name.removesuffix("Fast")


def is_known(name: str) -> bool:
    import transformers

    return bool(name) and (hasattr(transformers, name) or hasattr(transformers, name + "Fast"))


def code_of_its_own(tokenizer_config: dict[str, Any]) -> str | None:
    """The name of the class that the checkpoint brings, if it brings one."""
    auto_map = tokenizer_config.get("auto_map")
    own = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    return None if own is None else str(own)


def read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    return data if isinstance(data, dict) else {}
