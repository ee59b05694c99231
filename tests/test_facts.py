"""What `nanovllm info` says of a checkpoint: the value that is used, and the file that it stands in."""

import json
import shutil
from pathlib import Path

from nanovllm.facts import checkpoint_facts
from nanovllm.llm import EMBEDDED_MODEL
from tests.models.twins import TEMPLATE, Kind, make_tokenizer


def facts(path: Path) -> dict[str, tuple[str, str]]:
    return {name: (value, source) for name, value, source in checkpoint_facts(path)}


def test_the_embedded_model() -> None:
    found = facts(EMBEDDED_MODEL)
    assert found["dtype of the weights"] == ("bfloat16", "config.json: dtype")
    assert found["EOS ids"] == ("0", "generation_config.json")
    assert found["EOS of the tokenizer"] == ("<|endoftext|> (0)", "tokenizer_config.json")
    assert found["RoPE scaling"] == ("none", "config.json: rope_parameters")
    assert found["default temperature"] == ("0.8", "generation_config.json")


def test_every_place_is_named(tmp_path: Path) -> None:
    """The facts of a checkpoint of transformers 4 stand elsewhere."""
    kind = Kind(specials="special_tokens_map", template_file="chat_template.jinja", bos="post-processor")
    path = make_tokenizer(tmp_path / "model", kind)
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text()) | {
        "torch_dtype": "float16",
        "eos_token_id": [7, 3],
    }
    config |= {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1e6}
    for key in ("dtype", "rope_parameters", "max_position_embeddings"):
        del config[key]
    (path / "config.json").write_text(json.dumps(config))
    found = facts(path)
    assert found["dtype of the weights"] == ("float16", "config.json: torch_dtype")
    assert found["EOS ids"] == ("3, 7", "config.json")
    assert found["positions"] == (str(4 * 32768), "the default")
    assert found["RoPE theta"] == ("1e+06", "config.json: rope_theta")
    scaling, source = found["RoPE scaling"]
    assert scaling.startswith("YarnScaling, factor 4.0, ") and source == "config.json: rope_scaling"
    assert found["EOS of the tokenizer"][0].startswith("<|end|> (")
    assert found["EOS of the tokenizer"][1] == "special_tokens_map.json"
    assert found["chat template"] == (f"{len(TEMPLATE)} characters", "chat_template.jinja")
    assert "<s>" in found["the text 'x' becomes"][0]
    assert found["sampling defaults"] == ("none", "SamplingParams")


def test_a_tokenizer_that_cannot_be_read_is_a_fact_too(tmp_path: Path) -> None:
    path = Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "model"))
    (path / "tokenizer.json").unlink()
    value, why = facts(path)["tokenizer"]
    assert value == "none" and "no tokenizer.json" in why
