"""What `LLM` and the command line say of a checkpoint that is not right: all of it in one error, before anything runs.

The loader's own tests go through every fault (`tests/models`); here it is only whether that reaches the user whole.
"""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from nanovllm import LLM, cli
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.workers import start_executor
from tests.weights import lively_qwen3

STORY_MODEL = Path(__file__).parents[2] / "assets" / "story_model"
WEIGHTS = "model.safetensors"


def config(**changes: Any) -> Callable[[Path], None]:
    """Changes keys of config.json; None drops one."""

    def spoil(path: Path) -> None:
        raw = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))

    return spoil


def tensors(path: Path) -> None:
    held = load_file(path / WEIGHTS)
    del held["model.norm.weight"], held["lm_head.weight"]
    held["model.layers.0.self_attn.sinks"] = held["model.layers.0.self_attn.q_norm.weight"].clone()
    held["model.layers.0.mlp.down_proj.weight"] = held["model.layers.0.mlp.down_proj.weight"].T.contiguous()
    save_file(held, path / WEIGHTS, metadata={"format": "pt"})


def cut(path: Path) -> None:
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:1000])


FAULTS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "model type": (
        config(model_type="gpt2"),
        ("config.json", "model_type='gpt2'", "supported are llama, mistral, qwen2, qwen3"),
    ),
    "missing keys": (config(vocab_size=None, hidden_size=None), ("config.json", "vocab_size", "hidden_size")),
    "heads": (config(num_key_value_heads=3), ("num_attention_heads=4", "num_key_value_heads=3")),
    "RoPE scaling": (
        config(rope_parameters={"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4}),
        ("RoPE scaling 'longrope' is not supported", "default, linear, llama3, yarn"),
    ),
    "weights": (
        tensors,
        (
            "missing: lm_head.weight, model.norm.weight;",
            "unexpected: model.layers.0.self_attn.sinks;",
            "wrong shape: model.layers.0.mlp.down_proj.weight is [160, 96], not [96, 160]",
        ),
    ),
    "truncated": (cut, (WEIGHTS, "damaged or cut short", "fetch it again")),
    "no weights": (lambda path: (path / WEIGHTS).unlink(), ("no *.safetensors file", "converted")),
    "no config": (lambda path: (path / "config.json").unlink(), ("no config.json", "not a checkpoint")),
    "no JSON": (lambda path: (path / "config.json").write_text("{"), ("config.json", "cannot be read as JSON")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_spoilt_checkpoint_is_explained(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, parts = FAULTS[name]
    source = lively_qwen3(tmp_path_factory.getbasetemp() / "engine-checkpoints")
    path = Path(shutil.copytree(source, tmp_path / "model"))
    spoil(path)
    with pytest.raises(ValueError) as caught:
        LLM(path, device="cpu", kv_cache_gib=0.01, skip_tokenizer_init=True)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
    assert cli.main(["bench", "--model", str(path), "--device", "cpu", "--num-requests", "1"]) == 1
    assert capsys.readouterr().err == f"nanovllm: {' '.join(str(caught.value).split())}\n"


def test_a_tokenizer_that_fails_beside_the_weights_is_told_and_the_weights_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read in a thread while they are loaded."""
    path = Path(shutil.copytree(STORY_MODEL, tmp_path / "model"))
    said = json.loads((path / "tokenizer_config.json").read_text()) | {"tokenizer_class": "AutoConfig"}
    (path / "tokenizer_config.json").write_text(json.dumps(said))
    executors: list[Any] = []

    def start(*arguments: Any) -> Any:
        executors.append(start_executor(*arguments))
        return executors[-1]

    monkeypatch.setattr("nanovllm.llm.start_executor", start)
    with pytest.raises(ValueError, match="tokenizer_class='AutoConfig' does not read"):
        LLM(path, device="cpu", kv_cache_gib=0.01)
    assert [executor.runner.closed for executor in executors] == [True]
    LLM(path, device="cpu", kv_cache_gib=0.01, skip_tokenizer_init=True).close()
    cut(path)
    with pytest.raises(ValueError, match="damaged or cut short"):
        LLM(path, device="cpu", kv_cache_gib=0.01)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nanovllm-tokenizer")]


def test_without_text_hugging_face_is_not_asked_for_the_eos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing its library takes a second."""
    monkeypatch.setattr("nanovllm.text.tokenizer.Tokenizer.__init__", lambda *_: pytest.fail("it was asked"))
    with LLM(device="cpu", kv_cache_gib=0.01, skip_tokenizer_init=True) as llm:
        assert llm.engine.eos_token_ids == {0}


def test_dummy_weights_need_nothing_but_the_config(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    source = lively_qwen3(tmp_path_factory.getbasetemp() / "engine-checkpoints")
    shutil.copy(source / "config.json", tmp_path / "config.json")
    with LLM(tmp_path, device="cpu", kv_cache_gib=0.01, skip_tokenizer_init=True, load_format="dummy") as llm:
        assert len(llm.generate([[1, 2, 3]], use_tqdm=False)[0].outputs[0].token_ids) > 0


def test_a_truncation_that_training_left_behind_cuts_no_prompt(tmp_path: Path) -> None:
    """Nor does a padding make it longer: both are stored in tokenizer.json, and `tokenizers` would obey them."""
    text = "Nell the fox had a red kite, and she would not let go of it."
    whole = Tokenizer(STORY_MODEL).encode(text)
    stored = json.loads((STORY_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    stored["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    stored["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    stored["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    assert Tokenizer(tmp_path).encode(text) == whole and 4 < len(whole) < 64


def test_a_damaged_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"', encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read .* fetch it again"):
        Tokenizer(tmp_path)
