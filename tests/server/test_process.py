"""`nanovllm serve` as a process: its start, its end, what it refuses to do, and the snippets of its documentation."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from nanovllm.cli import main
from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8").partition("## The server")[2].partition("\n## ")[0]
DOCUMENT = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
CANARY = "the xylophone canary"


class Process:
    def __init__(self, command: list[str], **environment: str) -> None:
        self.popen = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as lines:
            for line in lines:
                self.output += line

    def url(self) -> str:
        deadline = time.monotonic() + 90
        while not (found := re.search(r"serving at (https?://\S+)", self.output)):
            assert self.popen.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.05)
        return found[1]

    def end(self) -> int:
        self.popen.send_signal(signal.SIGTERM)
        status = self.popen.wait(60)
        self._reader.join(10)
        return status


def children(pid: int) -> list[int]:
    """Of a server: the engine's process first, then the API processes."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@contextmanager
def started(command: list[str], **environment: str) -> Iterator[Process]:
    process = Process(command, **environment)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.wait()


def test_a_server_answers_drains_on_sigterm_and_has_kept_nothing_of_what_was_said() -> None:
    command = [sys.executable, "-m", "nanovllm.cli", "serve", "--port", "0", "--kv-cache-gib", "0.01"]
    with started(command, NANOVLLM_API_KEY="sesame") as process:
        url = process.url()
        with httpx.Client(base_url=url, headers={"authorization": "Bearer sesame"}, timeout=60) as http:
            assert httpx.get(f"{url}/v1/models").status_code == 401
            assert http.get("/health", headers={"host": "a.name"}).status_code == 200  # nobody without a key gets more
            assert http.get("/v1/models").json()["data"][0]["id"] == "story_model"
            for bad in {"prompt": CANARY, "stop": 5}, {"prompt": CANARY, "max_tokens": -1}, {"prompts": CANARY}:
                assert http.post("/v1/completions", json=bad).status_code == 400
            body = {"prompt": CANARY, "max_tokens": 150, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines = (line for line in response.iter_lines() if line)
                first = next(lines)
                process.popen.send_signal(signal.SIGTERM)
                rest, refused = [], 0
                for line in lines:
                    rest.append(line)
                    with socket.socket() as late:
                        refused += late.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0
        assert refused  # while the answer went on: a client that would be kept waiting cannot try another server
        assert rest[-1] == "data: [DONE]"
        last = json.loads(rest[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length" and "choices" in first
        assert process.end() == 0
        assert CANARY not in process.output and "Traceback" not in process.output
        told = process.output.splitlines()
        assert [line for line in told if "/v1/completions" in line and " 200 " in line] and len(told) < 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "options", "status"),
    [
        ([signal.SIGTERM, signal.SIGTERM], ["--drain-timeout", "1"], 0),
        ([signal.SIGTERM, signal.SIGINT], [], 0),
        ([signal.SIGINT, signal.SIGINT], [], 130),
    ],
    ids=["the drain takes too long", "Ctrl-C in a drain", "Ctrl-C twice"],
)
def test_an_end_that_cannot_wait_for_answers_is_in_order_too(
    signals: list[signal.Signals], options: list[str], status: int
) -> None:
    command = [sys.executable, "-m", "nanovllm.cli", "serve", "--port", "0", "--kv-cache-gib", "0.05", *options]
    with started(command) as process:
        url, body = f"{process.url()}/v1/completions", {"prompt": CANARY, "max_tokens": 1900, "ignore_eos": True}
        with ThreadPoolExecutor() as pool:
            whole = pool.submit(httpx.post, url, json=body, timeout=60)
            with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as response:
                lines = [line for line in signalled(response, process, signals) if line]
        assert process.popen.wait(60) == status  # and not that of an abort, with a thread still in torch
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "engine_stopped"
        assert whole.result().status_code == 503 and whole.result().json()["error"]["code"] == "engine_stopped"
        process._reader.join(10)
        assert "Traceback" not in process.output and process.output.count("\n") < 6, process.output


def signalled(response: httpx.Response, process: Process, signals: list[signal.Signals]) -> Iterator[str]:
    """The lines of a stream. After the first one, the server gets the signals."""
    lines = response.iter_lines()
    yield next(lines)
    for number in signals:
        process.popen.send_signal(number)
        time.sleep(0.3)
    yield from lines


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the rank in /proc")
def test_v5_a_server_whose_rank_is_killed_tells_everybody_and_ends_with_a_status_that_says_so() -> None:
    command = [sys.executable, "-m", "nanovllm.cli", "serve", "--port", "0", "--kv-cache-gib", "0.05"]
    with started([*command, "--device", "cpu", "--tensor-parallel-size", "2"]) as process:
        body = {"prompt": CANARY, "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{process.url()}/v1/completions", json=body, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            [rank] = [rank for engine in children(process.popen.pid) for rank in children(engine)]
            os.kill(rank, signal.SIGKILL)
            *_, error, last = lines
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_stopped"
        assert last == "data: [DONE]"
        assert process.popen.wait(30) == 1
        process._reader.join(10)
        assert "the engine's process has ended with status 1" in process.output


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl on this machine")
def test_a_server_from_a_file_speaks_https_behind_a_prefix(tmp_path: Path) -> None:
    key, cert, config = tmp_path / "key.pem", tmp_path / "cert.pem", tmp_path / "nanovllm.toml"
    make = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2 -subj /CN=localhost"
    subprocess.run([*make.split(), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    config.write_text(
        f'port = 0\nkv-cache-gib = 0.01\nssl-certfile = "{cert}"\nssl-keyfile = "{key}"\nroot-path = "/llm"\n'
        'api-key = ["one", "two"]\nserved-model-name = "mine"\nno-access-log = true\nlog-level = "warning"\n'
    )
    with started([sys.executable, "-m", "nanovllm.cli", "serve"], NANOVLLM_CONFIG=str(config)) as process:
        told = process.url()
        url = told.removesuffix("/llm")  # as the proxy would
        assert told.startswith("https://127.0.0.1:") and told.endswith("/llm")
        with httpx.Client(verify=str(cert), headers={"authorization": "Bearer two"}, timeout=30) as http:
            assert http.get(f"{url}/v1/models").json()["data"][0]["id"] == "mine"
            assert http.post(f"{url}/v1/completions", json={"prompt": CANARY, "max_tokens": 2}).status_code == 200
        assert process.end() == 0
        assert process.output.count("\n") == 1, process.output  # the address alone


@pytest.mark.slow
def test_a_program_that_forgets_to_shut_its_engine_down_ends_all_the_same() -> None:
    program = f"""
import asyncio
from nanovllm import AsyncLLM, SamplingParams
llm = AsyncLLM(kv_cache_gib=0.05)
stream = llm.generate({CANARY!r}, SamplingParams(max_tokens=1900, ignore_eos=True))
asyncio.run(stream.__anext__())
"""
    command = [sys.executable, "-c", program]
    with started(command) as process:
        assert process.popen.wait(60) == 0
        process._reader.join(10)
        assert process.output == ""


# --- the documentation -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on this machine")
@pytest.mark.parametrize(
    ("document", "kinds"),
    [
        pytest.param(README, ["sh", "python"], id="README"),
        pytest.param(DOCUMENT, ["sh", "sh", "python", "python"], id="docs"),
    ],
)
def test_the_snippets_of_the_documentation_run_as_they_stand(document: str, kinds: list[str], tmp_path: Path) -> None:
    """But for the port, which may be taken here."""
    found = re.findall(r"^```(sh|python)\n(.*?)^```$", document, flags=re.MULTILINE | re.DOTALL)
    port = str(free_port())
    snippets = [(kind, text.replace("8000", port)) for kind, text in found]
    script = tmp_path / "nanovllm"  # what `pip install` makes of the entry point
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nanovllm.cli "$@"\n')
    script.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    serve, *others = snippets
    assert "nanovllm serve" in serve[1] and [kind for kind, _ in others] == kinds
    with started(["sh", "-c", f"exec {serve[1]}"], PATH=path) as process:
        process.url()
        done = [run(kind, text) for kind, text in others]
        assert json.loads(done[0])["usage"]["completion_tokens"] <= 40
        for (kind, command), output in zip(others[1:], done[1:], strict=True):
            if kind == "sh":
                assert command.startswith("curl -N") and output.rstrip().endswith("data: [DONE]")
            else:
                assert len(output.split()) > 5
        assert process.end() == 0


def run(kind: str, text: str) -> str:
    command = ["sh", "-c", text] if kind == "sh" else [sys.executable, "-c", text]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- what is refused before anything is loaded -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--host", ""], "--api-key"),
        (["--host", "example.org"], "--api-key"),
        (["--host", "::"], "--api-key"),
        (["--api-key", ""], "--api-key"),
        (["--api-key", "ключ"], "--api-key"),
        (["--api-key", "sesame\n"], "--api-key"),
        (["--port", "70000"], "--port"),
        (["--drain-timeout", "0"], "--drain-timeout"),
        (["--max-body-mib", "nan"], "--max-body-mib"),
        (["--host", "192.0.2.1", "--insecure"], "cannot listen on 192.0.2.1"),
    ],
)
def test_refused_with_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["serve", *options]) == 1
    finally:
        signal.signal(signal.SIGTERM, handler)
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1


def test_a_port_that_is_taken_is_refused_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        try:
            assert main(["serve", "no/such-model", "--port", str(sock.getsockname()[1])]) == 1
        finally:
            signal.signal(signal.SIGTERM, handler)
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="needs bash")
def test_cluster_sh_asks_for_the_address_before_it_installs_anything(tmp_path: Path) -> None:
    (tmp_path / "make").write_text("#!/bin/sh\necho installing >&2\nexit 1\n")
    (tmp_path / "make").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "examples/cluster.sh", "join"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 1 and "HEAD:PORT" in done.stderr and "installing" not in done.stderr
