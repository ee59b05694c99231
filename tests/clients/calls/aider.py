"""aider, on a file in a directory of its own."""

import os
import tempfile
from typing import Any

from calls.shared import CALLS, PROMPT, Server, check_text

LACKS = dict.fromkeys(CALLS.keys() - {"chat", "stream"}, "reads edits from the text of a chat")


def talk(server: Server, stream: bool) -> str:
    os.chdir(tempfile.mkdtemp())
    os.environ["OPENAI_API_BASE"], os.environ["OPENAI_API_KEY"] = server.base_url, server.api_key
    from aider.coders import Coder
    from aider.io import InputOutput
    from aider.models import Model

    name = f"openai/{server.model}"
    model = Model(name, weak_model=name, editor_model=name)
    model.extra_params = {"max_tokens": 8}
    io = InputOutput(yes=True, pretty=False, fancy_input=False)
    coder: Any = Coder.create(
        main_model=model,
        edit_format="ask",
        io=io,
        fnames=[],
        use_git=False,
        stream=stream,
        suggest_shell_commands=False,
    )
    coder.run(PROMPT)
    return str(coder.partial_response_content)


def chat(server: Server) -> None:
    check_text(talk(server, stream=False))


def stream(server: Server) -> None:
    check_text(talk(server, stream=True))
