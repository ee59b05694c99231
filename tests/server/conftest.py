"""One server for all tests that only talk to it."""

from collections.abc import Iterator

import openai
import pytest

from tests.server.harness import Served, chat_model, server
from tests.server.scripted import TEMPLATE, Scripted


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The embedded model, with a chat template, and with what only the operator may allow."""
    options = {"allow_priority": True, "enable_prompt_tokens_details": True}
    with server(chat_model(tmp_path_factory.mktemp("model")), options) as running:
        yield running
        running.wait_idle()


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


@pytest.fixture(scope="session")
def scripted() -> Scripted:
    """An application whose engine says what a test wants."""
    return Scripted(TEMPLATE)
