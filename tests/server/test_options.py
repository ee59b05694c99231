"""Where an option's value may come from, and what is refused before anything heavy is imported (CASES V11)."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from nanovllm import __version__
from nanovllm.cli import main, parser
from nanovllm.config import EngineConfig, Speculation
from nanovllm.server import options
from tests.server.test_process import ROOT


def settled(*arguments: str, **environment: str) -> argparse.Namespace:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NANOVLLM_")}
    with patch.dict(os.environ, clean | environment, clear=True):
        args = parser().parse_args(["serve", *arguments])
        args.settle(args)
        return args


def test_the_command_line_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "nanovllm.toml"
    file.write_text('port = 1\nmax-queue = 2\nlog_level = "error"\n')
    args = settled("--port", "3", "--config", str(file), NANOVLLM_PORT="4", NANOVLLM_MAX_QUEUE="5")
    assert (args.port, args.max_queue, args.log_level, args.drain_timeout) == (3, 5, "error", 60)
    args = settled(NANOVLLM_CONFIG=str(file), NANOVLLM_PORT="")  # set but empty is not set
    assert (args.port, args.max_queue) == (1, 2)


def test_every_option_may_come_from_everywhere(tmp_path: Path) -> None:
    """With the same value as on the command line."""
    given: dict[str, Any] = {
        "model": "a/b", "device": "cpu", "dtype": "float32", "quantization": "fp8", "kv_cache_dtype": "fp8",
        "attention_backend": "torch_ref", "max_model_len": 5, "max_num_seqs": 6, "max_num_batched_tokens": 7,
        "num_kv_blocks": 8, "gpu_memory_utilization": 0.5,
        "kv_cache_gib": 0.25, "tensor_parallel_size": 2, "enable_expert_parallel": True, "enforce_eager": True,
        "no_enable_prefix_caching": True,
        "speculative": {"method": "ngram", "k": 2}, "generation_config": "vllm",
        "max_queue": 9, "served_model_name": "m", "host": "::1", "port": 10,
        "chat_template": "t", "root_path": "/llm", "api_servers": 3,
        "ssl_certfile": "c", "ssl_keyfile": "k", "api_key": ["x", "y"], "isolate_keys": True,
        "insecure": True, "allowed_hosts": ["h", "i"], "allowed_origins": ["o"], "allow_priority": True,
        "enable_prompt_tokens_details": True, "max_connections": 11, "max_body_mib": 1.5, "receive_timeout": 2.5,
        "drain_timeout": 12, "log_level": "debug", "no_access_log": True,
        "tool_parser": "hermes", "reasoning_parser": "none",
    }  # fmt: skip
    assert given.keys() == vars(settled()).keys() - {"config", "run", "settle"}, "an option is missing here"

    def as_text(value: Any) -> str:
        if isinstance(value, dict):
            return '{"method": "ngram", "k": 2}'
        return ",".join(value) if isinstance(value, list) else str(value)

    def as_toml(value: Any) -> str:
        if isinstance(value, dict):
            return '{method = "ngram", k = 2}'
        return str(value).lower() if isinstance(value, bool) else repr(value)

    line = [
        part
        for name, value in given.items()
        for part in [f"--{name.replace('_', '-')}", *([] if value is True else [as_text(value)])]
    ]
    from_line = settled(*line)
    from_environment = settled(**{f"NANOVLLM_{name.upper()}": as_text(value) for name, value in given.items()})
    file = tmp_path / "all.toml"
    file.write_text("".join(f"{name} = {as_toml(value)}\n" for name, value in given.items()))
    from_file = settled("--config", str(file))
    for args in from_line, from_environment, from_file:
        assert {name: getattr(args, name) for name in given} == given


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_queu = 5", "no option 'max_queu'; did you mean 'max_queue'"),
        ("config = 'x'", "no option 'config'"),
        ("port = 'eighty'", "port = 'eighty' is no value"),
        ("port = 80.5", "port = 80.5 is no value"),
        ("port = true", "port = True is no value"),
        ("api-key = 5", "api_key = 5 is no value"),
        ("api-key = ['a', 5]", "is no value"),
        ("insecure = 'perhaps'", "insecure must be true or false"),
        ("log-level = 'loud'", "log_level must be one of debug, info"),
        ("speculative = 'ngram'", "speculative = 'ngram' is no value"),
        ("port =", "cannot be read"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.toml") as caught:
        settled("--config", str(file))
    assert message in str(caught.value)


def test_a_mistake_in_the_environment_is_named() -> None:
    for name, value in ("PORT", "x"), ("SPECULATIVE", "ngram"), ("INSECURE", "perhaps"), ("CONFIG", "/no/such/file"):
        with pytest.raises(ValueError, match=f"NANOVLLM_{name}|/no/such/file"):
            settled(**{f"NANOVLLM_{name}": value})


def test_v11_a_mistake_costs_no_import_of_torch(tmp_path: Path) -> None:
    """All that can be known without it is looked at first: a mistake used to cost ten seconds."""
    lines = [
        ["--host", "0.0.0.0"], ["--max-num-seqs", "0"], ["--dtype", "int5"], ["--device", "gpu"], ["./no-such-model"],
        [str(tmp_path)], ["--speculative", '{"method": "magic"}'], ["--gpu-memory-utilization", "2"],
        ["--attention-backend", "none"], ["--config", "/no/such/file"], ["--generation-config", "no"],
    ]  # fmt: skip
    program = f"""
import sys
from nanovllm.cli import main
for line in {lines!r}:
    assert main(["serve", *line]) == 1, line
print("torch" in sys.modules, "transformers" in sys.modules, "fastapi" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False"] * 3, done.stderr
    errors = done.stderr.splitlines()
    assert len(errors) == len(lines) and all(line.startswith("nanovllm: ") for line in errors), done.stderr


def test_the_parent_imports_nothing_that_the_engine_would_wait_for() -> None:
    heavy = "torch", "transformers", "fastapi", "uvicorn"
    program = f"import sys, nanovllm.server.serve; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--isolate-keys"], "--isolate-keys needs"),
        (["--root-path", "llm"], "--root-path"),
        (["--root-path", "/llm/"], "--root-path"),
        (["--ssl-certfile", "x"], "--ssl-keyfile"),
        (["--ssl-certfile", "/no/file", "--ssl-keyfile", "/no/file"], "no such file"),
        (["--ssl-certfile", __file__, "--ssl-keyfile", __file__], "no certificate"),
        (["--chat-template", sys.executable], "UTF-8"),
        (["--max-connections", "0"], "--max-connections"),
        (["--receive-timeout", "nan"], "--receive-timeout"),
        (["--max-queue", "0"], "--max-queue"),
        (["--allowed-hosts", "a, b"], "--allowed-hosts"),
        (["--allowed-origins", ""], "--allowed-origins"),
        (["--api-key", "a,,b"], "--api-key"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 1
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1


def test_an_empty_variable_is_no_key() -> None:
    args = settled(NANOVLLM_API_KEY="")
    assert args.api_key == []
    options.check(args)
    args.host = "0.0.0.0"
    with pytest.raises(ValueError, match="--api-key"):
        options.check(args)


def test_what_is_switched_on_and_off() -> None:
    plain = options.engine_options(settled())
    args = settled("--enforce-eager", "--no-enable-prefix-caching")
    assert options.engine_options(args) == plain | {"enforce_eager": True, "enable_prefix_caching": False}
    assert {"enforce_eager", "enable_prefix_caching"}.isdisjoint(plain)


def test_how_to_guess_is_given_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    args = settled("--speculative", '{"method": "ngram", "k": 2}')
    said = {"speculative": args.speculative, "dtype": "auto", "kv_cache_dtype": "auto", "attention_backend": "auto"}
    assert options.engine_options(args) == said
    assert EngineConfig(speculative=args.speculative).speculation == Speculation(method="ngram", k=2, n=3)
    for wrong in "ngram", "3":
        with pytest.raises(SystemExit):
            parser().parse_args(["serve", "--speculative", wrong])
        assert f"argument --speculative: invalid json_object value: '{wrong}'" in capsys.readouterr().err


def test_help_tells_the_defaults_and_there_is_a_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ["serve", "--help"], ["--version"]:
        with pytest.raises(SystemExit) as ended:
            parser().parse_args(arguments)
        assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "address to listen on (default 127.0.0.1)" in " ".join(told.split()) and f"nanovllm {__version__}" in told


def test_a_model_may_be_named_both_ways() -> None:
    assert settled("a/b").model == "a/b"
    assert settled("--model", "a/b").model == "a/b"
    assert settled().model is None
