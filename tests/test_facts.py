"""What `nanovllm info` says of a checkpoint: the value that is used, and the file that it stands in."""

import json
import shutil
from pathlib import Path

import pytest

from nanovllm.facts import checkpoint_facts
from nanovllm.llm import EMBEDDED_MODEL
from tests.models.test_tokenizer_twins import KINDS
from tests.models.twins import TEMPLATE, Kind, auto_tokenizer, make_tokenizer


def facts(path: Path) -> dict[str, tuple[str, str]]:
    return {name: (value, source) for name, value, source in checkpoint_facts(path)}


def test_the_embedded_model() -> None:
    found = facts(EMBEDDED_MODEL)
    assert found["dtype of the weights"] == ("bfloat16", "config.json: dtype")
    assert found["EOS ids of the model"] == ("0", "generation_config.json: eos_token_id")
    assert found["EOS of the tokenizer"] == ("<|endoftext|> (0)", "tokenizer_config.json: eos_token")
    assert found["RoPE scaling"] == ("none", "config.json: rope_parameters")
    assert found["default temperature"] == ("0.8", "generation_config.json: temperature")
    assert found["tied embeddings"] == ("yes", "config.json: tie_word_embeddings")


def test_every_place_is_named(tmp_path: Path) -> None:
    """The facts of a checkpoint of transformers 4 stand elsewhere."""
    kind = Kind(specials="special_tokens_map", place="chat_template.jinja", bos="post-processor")
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
    assert found["EOS ids of the model"] == ("3, 7", "config.json: eos_token_id")
    assert found["positions"] == (str(4 * 32768), "config.json: rope_scaling")
    assert found["RoPE theta"] == ("1e+06", "config.json: rope_theta")
    scaling, source = found["RoPE scaling"]
    assert scaling.startswith("YarnScaling, factor 4.0, ") and source == "config.json: rope_scaling"
    assert found["EOS of the tokenizer"][0].startswith("<|end|> (")
    assert found["EOS of the tokenizer"][1] == "special_tokens_map.json: eos_token"
    assert found["chat template"] == (f"{len(TEMPLATE)} characters", "chat_template.jinja")
    assert "<s>" in found["the text 'x' becomes"][0]
    assert found["sampling defaults"] == ("none", "SamplingParams")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind.model == "byte-level BPE" else pytest.mark.slow) for kind in KINDS],
    ids=str,
)
def test_of_every_kind_the_file_that_is_named_has_the_say(kind: Kind, tmp_path: Path) -> None:
    """The value is Hugging Face's; and with another value in that place, the fact is another."""
    path = make_tokenizer(tmp_path / "model", kind)
    theirs = auto_tokenizer(path)
    found = facts(path)
    assert found["tokenizer"][0] == f"{type(theirs).__name__}, {len(theirs)} tokens"
    assert all((path / file).is_file() for file in found["tokenizer"][1].split(", "))
    around = theirs.decode(theirs("x")["input_ids"], clean_up_tokenization_spaces=False)
    assert found["the text 'x' becomes"][0] == repr(around)
    eos = "none" if theirs.eos_token is None else f"{theirs.eos_token} ({theirs.eos_token_id})"
    assert found["EOS of the tokenizer"][0] == eos
    template = theirs.get_chat_template() if theirs.chat_template else ""
    expected = f"{len(template)} characters" if template else "none"
    assert found["chat template"][0].split(", with tools")[0] == expected
    changed = {"EOS ids of the model": "77", "EOS of the tokenizer": "<|turn|> (", "chat template": "9 characters"}
    others = {"eos_token_id": 77, "eos_token": "<|turn|>", "chat_template": "{{ 'x' }}"}
    for fact, (key, other) in zip(list(changed), others.items(), strict=True):
        place, _, named = found[fact][1].partition(": ")
        file = path / place
        if named:
            said = json.loads(file.read_text())
            assert named == key and key in said
            file.write_text(json.dumps(said | {key: other}))
        elif file.is_file():
            file.write_text(str(other))
        else:
            assert found[fact] in [("none", "no file"), (eos, f"the default of {type(theirs).__name__}")]
            assert f'"{key}"' not in "".join(file.read_text() for file in path.glob("*config.json"))
            del changed[fact]
    now = facts(path)
    assert all(now[fact][0].startswith(shown) for fact, shown in changed.items()), now


def test_a_tokenizer_that_cannot_be_read_is_a_fact_too(tmp_path: Path) -> None:
    path = Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "model"))
    (path / "tokenizer.json").unlink()
    value, why = facts(path)["tokenizer"]
    assert value == "none" and "no tokenizer.json" in why
