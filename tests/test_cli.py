"""The command line, mostly in this process: what it prints, its options, and one line for a user's mistake."""

import argparse
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import cli
from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.server.options import ABOUT
from nanovllm.trace_view import Recording

ROOT = Path(__file__).resolve().parent.parent
STORY_MODEL = ROOT / "assets" / "story_model"
GREEDY = ["--temperature", "0", "--device", "cpu"]
COMMAND = [sys.executable, "-m", "nanovllm.cli"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte of KV cache, as by default, takes longer to clear than most of these tests."""
    monkeypatch.setattr(cli, "make_llm", partial(cli.make_llm, kv_cache_gib=0.02))


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = Path(shutil.copytree(STORY_MODEL, tmp_path_factory.mktemp("talking") / "model"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return str(path)


def test_generate_prints_the_prompt_and_what_follows(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "Once upon a time,", *GREEDY, "--max-tokens", "6"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "Once upon a time, in the sleepy village of Ivybridge\n"
    summary = (
        r"\[5 prompt tokens, 6 generated; first token after \d+ ms, [\d.]+ tokens/s after that; ended by length\]\n"
    )
    assert re.fullmatch(summary, printed.err)


def test_generate_shows_the_text_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Screen(io.StringIO):
        def flush(self) -> None:
            shown.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Screen())
    assert cli.main(["generate", "Once upon a time,", *GREEDY, "--max-tokens", "4"]) == 0
    growing = list(dict.fromkeys(text.rstrip("\n") for text in shown))
    assert growing == [
        ("Once upon a time," + end).rstrip()
        for end in ("", " in", " in the", " in the sleepy", " in the sleepy village")
    ]


def test_generate_keeps_what_the_engine_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run.html", "run.jsonl.gz"):
        asked = [*GREEDY, "--max-tokens", "6", "--trace", str(tmp_path / name)]
        assert cli.main(["generate", "Once upon a time,", *asked]) == 0
    recording = Recording.load(tmp_path / "run.jsonl.gz")
    assert sum(event["type"] == "token" for event in recording.events) == 6
    assert recording.about["title"] == "Once upon a time," and recording.about["num_blocks"] > 1
    assert recording.about.keys() >= {"block_size", "max_num_seqs", "max_num_batched_tokens"}
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "<title>" in page and '"text":" sleepy"' in page
    capsys.readouterr()
    assert cli.main(["generate", "Once", *GREEDY, "--trace", str(tmp_path / "no" / "run.html")]) == 1
    assert f"there is no directory {tmp_path / 'no'}" in capsys.readouterr().err


def test_sampling_options_arrive(capsys: pytest.CaptureFixture[str]) -> None:
    def text(*options: str) -> str:
        assert cli.main(["generate", "Nell", "--max-tokens", "3", "--device", "cpu", *options]) == 0
        return capsys.readouterr().out

    hot = ["--temperature", "2", "--seed", "1"]
    first, greedy = text(*hot), text("--temperature", "0", "--dtype", "float32", "--attention-backend", "torch_ref")
    assert first == text(*hot)
    assert len({first, greedy, text("--temperature", "2", "--seed", "2")}) == 3
    more = ["--allowed-token-ids", "65", "66", "67", "--bad-words", "b", "--logit-bias", '{"67": -100}']
    assert text(*hot, *more) == "Nellaaa\n"
    assert text(*hot, "--top-k", "1") == text(*hot, "--top-p", "1e-9") == greedy


def test_the_shape_of_an_answer_arrives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*options: str) -> str:
        assert cli.main(["generate", "Nell", "--max-tokens", "9", "--device", "cpu", "--seed", "1", *options]) == 0
        return capsys.readouterr().out.strip()

    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": [12]}')
    grammar.write_text('start: "!" start2\nstart2: "?"')
    assert text("--choice", "Tom", "--choice", "Anna") in ("NellTom", "NellAnna")
    assert [text("--regex", "q{3}"), text("--json-schema", str(schema))] == ["Nellqqq", "Nell12"]
    assert text("--grammar", str(grammar)) == "Nell!?"


@pytest.mark.parametrize("system", [None, "Be kind."])
def test_chat_remembers_the_conversation(
    talking: str, system: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts: list[list[int]] = []
    add = LLMEngine.add_request

    def spy(self: LLMEngine, request_id: str, prompt: list[int], *more: Any) -> None:
        prompts.append(prompt)
        add(self, request_id, prompt, *more)

    monkeypatch.setattr(LLMEngine, "add_request", spy)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nAnd then?\n"))  # ended by the end of the file
    named = ["--model", talking] if system is None else [talking, "--system-prompt", system]
    assert cli.main(["chat", *named, *GREEDY, "--max-tokens", "4"]) == 0
    printed = capsys.readouterr()
    assert "ends the conversation" in printed.err
    first, second = [answer for answer in printed.out.replace("> ", "").split("\n") if answer][:2]
    assert first and second
    from nanovllm.text.tokenizer import Tokenizer

    tokenizer, begin = Tokenizer(STORY_MODEL), "" if system is None else f"system: {system}\n"
    assert [tokenizer.decode(prompt) for prompt in prompts] == [
        f"{begin}user: Hello\nassistant:",
        f"{begin}user: Hello\nassistant: {first}\nuser: And then?\nassistant:",
    ]


def test_chat_ends_at_an_empty_line(talking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\nHello\n"))
    assert cli.main(["chat", "--model", talking, "--device", "cpu"]) == 0
    assert sys.stdin.read() == "Hello\n"


def test_bench_counts_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--num-requests", "3", "--max-length", "20", "--load-format", "dummy", "--device", "cpu"]
    assert cli.main(["bench", str(STORY_MODEL), *options]) == 0
    out = capsys.readouterr().out
    found = re.fullmatch(
        r"3 requests, (\d+) prompt tokens, (\d+) output tokens\n([\d.]+) s, ([\d.]+) output tokens/s\n", out
    )
    assert found, out
    assert 3 * 2 <= int(found[1]) <= 3 * 20 and 3 * 2 <= int(found[2]) <= 3 * 20


def test_info_says_what_was_chosen_and_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a process without pytest
    assert cli.main(["info", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for part in (f"torch {torch.__version__}", "CPU threads", str(STORY_MODEL), "attention backend: torch_ref"):
        assert part in out
    assert torch.cuda.is_available() or "no usable CUDA GPU" in out
    assert re.search(r"attention_backend='auto' chose torch_ref: .+", out)  # with the reason
    for line in ("max_model_len = 2048", "kvcache_block_size = 16", "async_scheduling = False"):
        assert f"  {line}\n" in out
    assert re.search(r"  num_kv_blocks = \d+\n", out)  # found out, not None


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["generate", "Nell \udcff"], ("the prompt", "UTF-8")),
        (
            ["generate", "x", "--model", "no/such/model/here"],
            ("no/such/model/here", "neither a directory nor a hub id"),
        ),
        (["generate", "x", "--model", str(ROOT / "docs")], ("no config.json", "not a checkpoint")),
        (["generate", "x", "--device", "gpu"], ("device", "'gpu'")),
        (["generate", "x", "--dtype", "int4"], ("dtype", "'int4'", "bfloat16")),
        (["generate", "x", "--attention-backend", "magic"], ("attention_backend", "'magic'", "triton")),
        (["generate", "x", "--tensor-parallel-size", "3"], ("tensor_parallel_size=3", "4 heads")),
        (["generate", "x", "--max-tokens", "0"], ("max_tokens must be at least 1", "got 0")),
        (["generate", "x", "--temperature", "-1"], ("temperature must be 0 (greedy) or a positive", "got -1")),
        (["generate", "x", "--top-p", "2"], ("top_p must be in (0, 1]", "got 2")),
        (["generate", "x", "--top-k", "-5"], ("top_k must be positive", "got -5")),
        (["generate", "x", "--seed", "-5"], ("seed must be in", "got -5")),
        (["generate", ""], ("prompt_token_ids is empty", "at least one token")),
        (["generate", "once upon a time " * 800], ("tokens", "max_model_len=2048", "shorten")),
        (["chat", "--model", str(ROOT / "assets" / "story_draft")], ("no chat template", "use generate")),
        (["bench", "--num-requests", "0"], ("--num-requests", "at least 1", "0")),
        (["bench", "--max-length", "-3"], ("--max-length", "at least 1", "-3")),
        (["bench", "--max-length", "5000"], ("tokens", "max_model_len=2048")),
        (["bench", "--load-format", "pickle"], ("load_format", "'pickle'")),
        (["info", "--model", "nothing"], ("model='nothing'", "hub id")),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments, *([] if "--device" in arguments else ["--device", "cpu"])]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("nanovllm: ") and printed.err.count("\n") == 1, printed.err
    assert [part for part in parts if part not in printed.err] == [], printed.err
    assert arguments[0] == "info" or printed.out == ""  # no half of an answer before it


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve", "--tool-call-parser", "hermes"], "--tool-call-parser; did you mean --tool-parser?"),
        (["generate", "x", "--temprature=0"], "--temprature=0; did you mean --temperature?"),
        (["chat", "--disable-log-requests"], "--disable-log-requests"),
        (["generate", "two", "words"], "words"),
    ],
)
def test_an_unknown_argument_is_told_by_the_command(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    err, name = capsys.readouterr().err, f"nanovllm {arguments[0]}"
    assert ended.value.code == 2 and err.startswith(f"usage: {name} ")
    assert err.endswith(f"\n{name}: error: unrecognized arguments: {told}\n")


@pytest.mark.parametrize("option", ["--json-schema", "--grammar"])
def test_a_file_in_another_encoding_is_named(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schema"
    file.write_text('{"title": "Größe"}', "latin-1")
    assert cli.main(["generate", "Nell", option, str(file)]) == 1
    assert capsys.readouterr().err == f"nanovllm: {file} is no text in UTF-8; save it as UTF-8\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "x", "--device", "cuda"]) == 1
    err = capsys.readouterr().err
    assert "device='cuda'" in err and "device='cpu'" in err and err.count("\n") == 1


def test_an_error_of_many_lines_becomes_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def snapshot_download(repo_id: str, **more: Any) -> str:
        raise OSError("404 Client Error.\n\nRepository Not Found.\nPlease make sure")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert cli.main(["generate", "x", "--model", "nobody/nothing"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "nobody/nothing" in err and "Repository Not Found. Please make sure" in err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "COMMAND"),
        (["serv"], "invalid choice: 'serv'"),
        (["generate"], "prompt"),
        (["generate", "x", "--max-tokens", "many"], "--max-tokens: invalid int value: 'many'"),
        (["generate", "x", "--logit-bias", '{"the": 1}'], "must map token ids to biases: '{\"17\": -100}'; got '{\"th"),
        (["generate", "x", "--best-of", "3"], "unrecognized arguments: --best-of"),
    ],
)
def test_what_the_parser_refuses(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert part in err and "usage: nanovllm" in err and "Traceback" not in err


def test_each_option_says_what_it_is_and_what_its_default_is() -> None:
    commands = [cli.parser()]
    for parser in commands:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                commands += action.choices.values()
            else:
                assert action.help, (parser.prog, action.dest)
    assert len(commands) > 9
    for name, text in ABOUT.items():
        default = getattr(EngineConfig, name)
        assert "default" in text or default is None, name
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert f"(default {default})" in text


def test_a_package_that_the_server_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "uvicorn" else True)
    monkeypatch.setattr(cli, "set_up", lambda level: None)
    assert cli.main(["serve", "--device", "cpu"]) == 1
    assert capsys.readouterr().err == (
        "nanovllm: the server needs uvicorn, which is not installed: pip install 'nanovllm[serve]'\n"
    )


def test_help_needs_no_torch() -> None:
    program = (
        "import sys; from nanovllm import cli\n"
        "try: cli.main(['generate', '--help'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--temperature" in done.stdout and done.stderr == ""


def test_control_c_in_this_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    step, close = LLMEngine.step, LLMEngine.close
    steps: list[LLMEngine] = []
    closed: list[LLMEngine] = []

    def interrupted(self: LLMEngine) -> Any:
        steps.append(self)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    def closing(self: LLMEngine) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(LLMEngine, "step", interrupted)
    monkeypatch.setattr(LLMEngine, "close", closing)
    assert cli.main(["generate", "Once upon a time,", *GREEDY]) == 130
    printed = capsys.readouterr()
    assert printed.out == "Once upon a time, in the" and printed.err == "\n"
    assert closed and not closed[0].has_unfinished()


def test_control_c_in_a_real_process() -> None:
    arguments = ["generate", "Once upon a time,", "--device", "cpu", "--max-tokens", "1000"]
    with subprocess.Popen(
        [*COMMAND, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(20)  # it writes
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == "\n"


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_a_closed_pipe_is_no_traceback() -> None:
    shell = '"$0" -m nanovllm.cli generate "Once upon a time," --max-tokens 1000 | head -c 20; exit ${PIPESTATUS[0]}'
    done = subprocess.run(["bash", "-c", shell, sys.executable], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr, done.stdout) == (141, "", "Once upon a time, in")


def test_a_closed_standard_output_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it after `nanovllm ... >&-`
    assert cli.main(["generate", "Nell", *GREEDY, "--max-tokens", "1"]) == 0


def test_a_terminal_that_lacks_a_character_gets_another(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, "latin-1"))
    assert cli.main(["generate", "Crème 日本", *GREEDY, "--max-tokens", "1"]) == 0
    assert screen.getvalue().startswith("Crème ??".encode("latin-1"))


def test_python_m_nanovllm_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "nanovllm", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("nanovllm ") and done.returncode == 0


def test_threads_that_wait_spin_for_a_short_time_unless_the_user_says_otherwise() -> None:
    """Set before torch is imported, which reads it only then."""
    code = "import os, sys, nanovllm; assert 'torch' not in sys.modules; print(os.environ.get('GOMP_SPINCOUNT'))"
    names = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
    unset = {name: value for name, value in os.environ.items() if name not in names}
    for more, spins in (({}, "30000"), ({names[0]: "ACTIVE"}, "None"), ({names[1]: "7"}, "7")):
        environment = unset | more
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == [spins], done.stderr
