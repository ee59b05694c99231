"""Every call of two public clients; `make test-clients` has the others, and docs/clients.md what came of it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from nanovllm.llm import EMBEDDED_MODEL
from tests.clients import matrix
from tests.clients.calls.shared import CALLS
from tests.server.test_process import ROOT, started


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "nanovllm.cli", "serve", "--port", "0", "--kv-cache-gib", "0.05"]
    with started([*command, "--tool-parser", "hermes"]) as process:
        yield process.url()


@pytest.mark.slow
@pytest.mark.parametrize("client", ["openai", "llm"])
def test_every_call(url: str, client: str) -> None:
    if find_spec(client) is None:
        pytest.skip(f"{client} is not installed: make setup")
    command = [sys.executable, "tests/clients/one.py", client, f"{url}/v1", EMBEDDED_MODEL.name, str(EMBEDDED_MODEL)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    told = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CALL ")]
    assert [one["call"] for one in told] == list(CALLS), done.stderr
    assert not [one for one in told if not one.get("ok", "lacks" in one)], done.stderr


def test_the_page_has_each_client_in_the_version_that_is_pinned_and_nothing_failed() -> None:
    page = matrix.PAGE.read_text("utf-8").partition(matrix.BEGIN)[2].partition(matrix.END)[0]
    for client in matrix.CLIENTS:
        [row] = [line for line in page.splitlines() if line.startswith(f"| {client.package} | ")]
        cells = [cell.strip() for cell in row.split("|")[2:-1]]
        assert cells[0] == matrix.version_of(client) and len(cells) == 1 + len(CALLS)
        assert set(cells[1:]) <= {"yes", "n/a"}, client.package
