"""The sampling defaults of a checkpoint's generation_config.json: where they hold, and where not (CASES K4)."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM, GenerationConfig

pytest.importorskip("pydantic", reason="the extra serve is not installed")
pytest.importorskip("openai", reason="the extra dev is not installed")

from nanovllm import LLM, SamplingParams, cli
from nanovllm.async_llm import AsyncLLM
from nanovllm.engine.engine import LLMEngine
from nanovllm.llm import EMBEDDED_MODEL
from nanovllm.models.checkpoint import SAMPLING_DEFAULTS, read_eos_token_ids, read_sampling_defaults
from nanovllm.server.openai.chat import ChatRequest
from nanovllm.server.openai.protocol import CompletionRequest
from tests.server.harness import server

SMALL: dict[str, Any] = {"num_kv_blocks": 32, "kvcache_block_size": 16, "max_model_len": 200, "device": "cpu"}
RECOMMENDED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}
SAID = RECOMMENDED | {"max_new_tokens": 3, "do_sample": True, "eos_token_id": 0}
DEFAULTS = RECOMMENDED | {"max_tokens": 3}


def copy(directory: Path, **said: Any) -> Path:
    path = Path(shutil.copytree(EMBEDDED_MODEL, directory / f"model{len(list(directory.iterdir()))}"))
    (path / "generation_config.json").write_text(json.dumps(said))
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SamplingParams]]:
    """The parameters of every request that reaches an engine."""
    seen: list[SamplingParams] = []
    add = LLMEngine.add_request

    def spy(self: LLMEngine, request_id: str, ids: list[int], params: SamplingParams, *more: Any, **rest: Any) -> Any:
        seen.append(params)
        return add(self, request_id, ids, params, *more, **rest)

    monkeypatch.setattr(LLMEngine, "add_request", spy)
    yield seen


def chosen(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in DEFAULTS}


def test_what_is_taken_is_what_hugging_face_reads(tmp_path: Path) -> None:
    path = copy(tmp_path, **SAID)
    theirs = GenerationConfig.from_pretrained(path)
    assert read_sampling_defaults(path) == {name: getattr(theirs, key) for key, name in SAMPLING_DEFAULTS.items()}
    assert read_sampling_defaults(copy(tmp_path, temperature=None, top_k=None)) == {}
    (path / "generation_config.json").unlink()
    assert read_sampling_defaults(path) == {}


def test_without_generation_config_json_they_stand_in_config_json(tmp_path: Path) -> None:
    """As in Hugging Face; with that file, config.json has no say."""
    path = copy(tmp_path, temperature=0.5)
    config = json.loads((path / "config.json").read_text()) | {"temperature": 0.3, "top_k": 7, "eos_token_id": 5}
    (path / "config.json").write_text(json.dumps(config))
    for expected, eos in (({"temperature": 0.5}, set()), ({"temperature": 0.3, "top_k": 7}, {5})):
        theirs: Any = AutoModelForCausalLM.from_pretrained(path).generation_config
        taken = {name: getattr(theirs, key) for key, name in SAMPLING_DEFAULTS.items()}
        assert read_sampling_defaults(path) == expected == {k: v for k, v in taken.items() if v is not None}
        assert read_eos_token_ids(path) == eos == ({theirs.eos_token_id} - {None})
        (path / "generation_config.json").unlink(missing_ok=True)
    (path / "config.json").write_text(json.dumps(config | {"temperature": -1}))
    with pytest.raises(ValueError, match=r"/config\.json: temperature must be .*-1"):
        LLM(path, **SMALL)


def test_offline_they_hold_where_no_parameters_are_given(tmp_path: Path, asked: list[SamplingParams]) -> None:
    path = copy(tmp_path, **SAID)
    with LLM(path, **SMALL) as llm:
        llm.generate("Nell", use_tqdm=False)
        llm.chat([{"role": "user", "content": "Nell"}], use_tqdm=False)
        llm.generate("Nell", SamplingParams(max_tokens=1), use_tqdm=False)
    with LLM(path, generation_config="vllm", **SMALL) as llm:
        llm.generate([[1]], use_tqdm=False)
    plain = chosen(SamplingParams())
    assert [chosen(params) for params in asked] == [DEFAULTS, DEFAULTS, plain | {"max_tokens": 1}, plain]


def test_in_a_task_they_hold_where_no_parameters_are_given(tmp_path: Path, asked: list[SamplingParams]) -> None:
    async def ask_twice() -> None:
        async with AsyncLLM(copy(tmp_path, **SAID), **SMALL) as llm:
            for params in (None, SamplingParams(max_tokens=1)):
                async for _ in llm.generate("Nell", params):
                    pass

    asyncio.run(ask_twice())
    assert [chosen(params) for params in asked] == [DEFAULTS, chosen(SamplingParams(max_tokens=1))]


def test_over_http_they_hold_for_absent_fields(tmp_path: Path, asked: list[SamplingParams]) -> None:
    with server(copy(tmp_path, **SAID)) as served:
        text, chat = {"prompt": "Nell"}, {"messages": [{"role": "user", "content": "Nell"}]}
        for path, body in (
            ("completions", text),
            ("completions", text | {"temperature": 0, "top_k": None, "max_tokens": 2}),
            ("chat/completions", chat | {"top_p": 1.0, "min_p": 0.0, "top_k": 0}),
        ):
            httpx.post(f"{served.url}/v1/{path}", json=body, timeout=30).raise_for_status()
    expected = DEFAULTS, DEFAULTS | {"temperature": 0, "max_tokens": 2}, DEFAULTS | {"top_p": 1, "min_p": 0, "top_k": 0}
    assert [chosen(params) for params in asked] == list(expected)


def test_without_defaults_a_request_is_as_ever() -> None:
    for request in (CompletionRequest(prompt="x"), ChatRequest(messages=[{"role": "user", "content": "x"}])):
        assert chosen(request.sampling_params(64, None, {})) == chosen(SamplingParams())


def test_on_the_command_line_they_hold_for_options_that_are_not_given(
    tmp_path: Path,
    asked: list[SamplingParams],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "make_llm", partial(cli.make_llm, kv_cache_gib=0.02))
    run = ["generate", "Nell", "--device", "cpu", "--model", str(copy(tmp_path, **SAID))]
    for options in ([], ["--temperature", "0", "--max-tokens", "1"], ["--generation-config", "vllm", "--top-k", "1"]):
        assert cli.main([*run, *options]) == 0
    vllm = chosen(SamplingParams(top_k=1, max_tokens=cli.MAX_TOKENS))
    assert [chosen(p) for p in asked] == [DEFAULTS, DEFAULTS | {"temperature": 0, "max_tokens": 1}, vllm]
    capsys.readouterr()
    assert cli.main(["info", *run[-1:], "--device", "cpu"]) == 0
    table = " ".join(capsys.readouterr().out.split())
    for name, value in DEFAULTS.items():
        assert f"default {name} {value} generation_config.json: " in table


def test_defaults_that_make_no_sense_are_refused_by_file_and_name(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"generation_config\.json: temperature must be .*-1.*generation_config='vllm'"
    ):
        LLM(copy(tmp_path, temperature=-1), **SMALL)
    LLM(copy(tmp_path, temperature="hot"), generation_config="vllm", **SMALL).close()
    with pytest.raises(ValueError, match="generation_config must be one of auto, vllm; got 'mine'"):
        LLM(generation_config="mine")


def test_what_would_change_a_text_and_is_not_supported_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copy(tmp_path, num_beams=4, no_repeat_ngram_size=2, typical_p=1.0, guidance_scale=None, temperature=0.5)
    assert read_sampling_defaults(path) == {"temperature": 0.5}
    assert "num_beams, no_repeat_ngram_size: not supported, and ignored" in caplog.text
    path = copy(
        tmp_path, penalty_alpha=0.6, top_h=0.4, exponential_decay_length_penalty=[8, 1.1], watermarking_config=None
    )
    assert read_sampling_defaults(path) == {}
    assert "penalty_alpha, top_h, exponential_decay_length_penalty: not supported, and ignored" in caplog.text


def test_the_embedded_model_tells_its_stories_at_their_temperature(asked: list[SamplingParams]) -> None:
    with LLM(**SMALL) as llm:
        llm.generate("Nell", use_tqdm=False)
    assert [params.temperature for params in asked] == [0.8]
