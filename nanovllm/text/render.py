"""Renders chat templates in a separate process, with bounds on time and memory.

A template is a program that comes with a checkpoint, and loops over what clients send. The sandbox of `transformers`
keeps a template from files and from Python, but not from running for ever or filling the memory. So a server renders
templates in a child process: this module, run as a program. The child reads one request per line, and answers each with
one line.

The time of a template is CPU time, which does not depend on what else the machine does. The parent's clock is only for
a child that does not get this CPU time: such a child says nothing about its template.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SECONDS = 5.0  # of CPU time, for one conversation
PATIENCE = 4  # times as many seconds by the clock
TICK = 0.25  # seconds between two looks at that clock
START_SECONDS = 60.0  # for the start of the child, whose imports take a second
MEMORY = 1 << 29  # bytes that the child may take beyond what it has after its start
CHARACTERS = 1 << 25  # of a rendered conversation
KILLED = -9  # the status of a child that was killed: for want of time, or by a system that wants memory


class TemplateTooExpensive(ValueError):
    """A template took too much time or memory, or made too long a text."""


class TemplateTooSlow(ValueError):
    """A template did not get the time that it may take. It may be a good template on a busy machine."""


class TemplateSyntax(ValueError):
    """A template has a syntax error, in line `lineno`."""

    def __init__(self, message: str, lineno: int) -> None:
        super().__init__(message)
        self.lineno = lineno


class Renderer:
    """The child process. It starts when it is first needed, and again after it was killed. Any thread may call this."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._deadline = float("inf")  # of the request that the child works on, by time.monotonic()

    def render(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """Render messages, in plain dicts and lists, as `render_jinja_template` of `transformers` does.

        `arguments`: `chat_template`, `add_generation_prompt`, the names of special tokens, whatever the template takes.
        Raises TemplateTooExpensive, TemplateTooSlow, TemplateSyntax, and ValueError with the template's reason if it
        refuses.
        """
        try:
            line = json.dumps({"conversations": [messages], **arguments}).encode() + b"\n"
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
                [sys.executable, "-P", __file__, str(self.seconds)],  # nothing of this package is imported
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
            threading.Thread(target=self._watch, args=(self._child,), name="nanovllm-renderer", daemon=True).start()
            self._exchange(b"", START_SECONDS)
        return self._exchange(line, PATIENCE * self.seconds)

    def _exchange(self, line: bytes, seconds: float) -> dict[str, Any]:
        """Send a line and read a line. A child that takes longer than `seconds` is killed, which ends the reading."""
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        self._deadline = time.monotonic() + seconds
        try:
            child.stdin.write(line)
            child.stdin.flush()
            answer = child.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            self._deadline = float("inf")
        if answer.endswith(b"\n"):
            found: dict[str, Any] = json.loads(answer)
            return found
        self._end()
        if child.returncode == KILLED:
            raise TemplateTooSlow(f"the chat template was not rendered within {seconds:g} s on this busy machine")
        raise TemplateTooExpensive(f"the chat template took more than {self.seconds:g} s or {MEMORY >> 20} MiB")

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        """Kill the child after the deadline. One thread does this as long as the child lives, since starting a thread
        for each chat takes time."""
        while child.poll() is None:
            time.sleep(TICK)
            if time.monotonic() > self._deadline:
                child.kill()

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in self._child.stdin, self._child.stdout:
                if pipe is not None:
                    pipe.close()
            self._child = None


# --- the child -------------------------------------------------------------------------------------------------------


def serve(seconds: float) -> None:
    """Answer each line of stdin. When there are no more, the parent is gone. A line that costs more than these seconds
    of CPU time ends the process."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    bound_memory()
    print("{}", flush=True)  # tells the parent that the child is ready
    for line in sys.stdin.buffer:
        answer: dict[str, Any]
        bound_time(seconds)
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
        bound_time(0)
        print(json.dumps(answer), flush=True)


def bound_time(seconds: float) -> None:
    """End this process after so many seconds of CPU time; 0 is never. On a system without such timers, only the
    parent's clock bounds the time."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def bound_memory() -> None:
    """Bound the memory of this process. On a system without /proc, only the time is bounded."""
    usage = Path("/proc/self/statm")
    if usage.exists():
        import resource

        most = int(usage.read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    serve(float(sys.argv[1]))
