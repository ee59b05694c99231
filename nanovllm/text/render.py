"""Renders chat templates in a process of its own, with bounds on time and memory.

A template is a program that comes with a checkpoint, and loops over what clients send. The sandbox of `transformers`
keeps it from files and from Python, but not from running for ever or filling the memory. So a server has it rendered by
a child: this module, run as a program, which reads one request a line and answers with one line.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SECONDS = 5.0  # for one conversation
START_SECONDS = 60.0  # for the child to be there, which imports for a second
MEMORY = 1 << 29  # bytes that the child may take beside what it has at its start
CHARACTERS = 1 << 25  # of a rendered conversation


class TemplateTooExpensive(ValueError):
    """A template went beyond its bounds."""


class TemplateSyntax(ValueError):
    """A template is no template. `lineno`: where."""

    def __init__(self, message: str, lineno: int) -> None:
        super().__init__(message)
        self.lineno = lineno


class Renderer:
    """The child, started when it is first needed and again after it had to be ended. Any thread may call."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """What `apply_chat_template` of the tokenizers of `transformers` makes of messages in plain dicts and lists.

        `arguments`: `chat_template`, `add_generation_prompt`, the names of special tokens, whatever the template takes.
        Raises TemplateTooExpensive, TemplateSyntax, and ValueError with the reason of a template that refuses.
        """
        present = [{name: value for name, value in m.items() if value is not None} for m in messages]
        try:
            line = json.dumps({"conversations": [present], **arguments}).encode() + b"\n"
        except RecursionError:
            raise ValueError("what a template is given is nested too deeply") from None
        with self._lock:
            answer = self._ask(line)
        if "syntax" in answer:
            raise TemplateSyntax(answer["syntax"], answer["lineno"])
        if "error" in answer:
            raise ValueError(answer["error"])
        if "expensive" in answer:
            raise TemplateTooExpensive(answer["expensive"])
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    def _ask(self, line: bytes) -> dict[str, Any]:
        if self._child is None or self._child.poll() is not None:
            self._end()
            self._child = subprocess.Popen(
                [sys.executable, "-P", __file__],  # nothing of this package is imported
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
            self._exchange(b"", START_SECONDS)
        return self._exchange(line, self.seconds)

    def _exchange(self, line: bytes, seconds: float) -> dict[str, Any]:
        """Send a line and read one. A child that takes too long is killed, which ends the reading."""
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        watchdog = threading.Timer(seconds, child.kill)
        watchdog.start()
        try:
            child.stdin.write(line)
            child.stdin.flush()
            answer = child.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            watchdog.cancel()
        if answer.endswith(b"\n"):
            found: dict[str, Any] = json.loads(answer)
            return found
        self._end()
        raise TemplateTooExpensive(f"the chat template took more than {seconds:g} s or {MEMORY >> 20} MiB")

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in self._child.stdin, self._child.stdout:
                if pipe is not None:
                    pipe.close()
            self._child = None


# --- the child -------------------------------------------------------------------------------------------------------


def serve() -> None:
    """Answer lines until there are no more: the parent is gone then."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    bound_memory()
    print("{}", flush=True)  # here
    for line in sys.stdin.buffer:
        answer: dict[str, Any]
        try:
            [text], _ = render_jinja_template(**json.loads(line))
            too_long = f"the chat template made {len(text)} characters; the most are {CHARACTERS}"
            answer = {"text": text} if len(text) <= CHARACTERS else {"expensive": too_long}
        except TemplateSyntaxError as error:
            answer = {"syntax": str(error), "lineno": error.lineno}
        except (MemoryError, RecursionError) as error:
            answer = {"expensive": f"the chat template needs too much memory ({type(error).__name__})"}
        except Exception as error:  # a template is a program
            answer = {"error": (str(error) or type(error).__name__)[:1000]}
        print(json.dumps(answer), flush=True)


def bound_memory() -> None:
    """Where there is no /proc, only the time is bounded."""
    usage = Path("/proc/self/statm")
    if usage.exists():
        import resource

        most = int(usage.read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    serve()
