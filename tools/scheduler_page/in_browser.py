"""The Python side of the page: answers its questions, where there is neither torch nor xxhash nor pytest."""

from __future__ import annotations

import ast
import json
import platform
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

STAGE_5 = Path("stages/stage_5_continuous_batching.py")
TESTS = Path("tests/stages/test_stage_5_continuous_batching.py")
EDITOR = "your scheduler"  # the file's name in tracebacks
MOST_LINES = 200_000  # that the reader's code may run for one answer; an ordinary answer takes ten thousand


class Absent:
    """Any class or decorator of a library that is not there. Whoever only names it does not notice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, decorated: Any) -> Any:
        return decorated


class AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


def install() -> None:
    """Put stand-ins in the place of the libraries. For digests any hash does: what counts is that equals are equal."""
    for name in ("torch", "torch.nn", "torch.nn.functional", "stages.checkpoint", "stages.model"):
        sys.modules[name] = AbsentModule(name)
        parent, _, child = name.rpartition(".")
        if parent.startswith("torch"):
            setattr(sys.modules[parent], child, sys.modules[name])
    xxhash: Any = ModuleType("xxhash")
    xxhash.xxh3_128_digest = lambda data: blake2b(data, digest_size=16).digest()
    xxhash.xxh64_intdigest = lambda data: int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
    xxhash.xxh3_64_intdigest = xxhash.xxh64_intdigest
    pytest: Any = ModuleType("pytest")
    pytest.fixture = lambda function: function
    sys.modules |= {"xxhash": xxhash, "pytest": pytest}


def respond(question: str) -> str:
    """One question of the page and its answer, both JSON.

    hello   -> the reader's class with its holes open, and filled in
    play    setup, and code for the reader's scheduler instead of the engine's -> see `play`
    fleet   setup -> see `play_fleet`
    test    code -> name, words, passed and message of each test of stage 5 that needs no model
    """
    asked = json.loads(question)
    if asked["do"] == "hello":
        from tools.exercises.exercises import cut

        source = STAGE_5.read_text(encoding="utf-8")
        return json.dumps(
            {"python": platform.python_version(), "holes": scheduler(cut(source)), "ours": scheduler(source)}
        )
    if asked["do"] == "test":
        return json.dumps({"tests": list(tested(asked["code"]))})
    if asked["do"] == "fleet":
        from tools.scheduler_page.fleet import FleetSetup, play_fleet

        return json.dumps(play_fleet(FleetSetup.parse(asked["setup"])))
    from tools.scheduler_page.play import Setup, play

    try:
        with bounded():
            module = None if asked.get("code") is None else loaded(asked["code"])
            return json.dumps(play(Setup.parse(asked["setup"]), module, told))
    except Exception as error:  # before the first step
        return json.dumps({"frames": [], "error": told(error)})


def scheduler(source: str) -> str:
    """The class `Scheduler` of a stage 5."""
    return source[source.index("class Scheduler:") : source.index("class ContinuousBatchingEngine")].strip() + "\n"


def loaded(code: str) -> ModuleType:
    """A stage 5 with the reader's class in the place of ours. Raises whatever the code raises."""
    module = sys.modules["exercises.stage_5"] = ModuleType("exercises.stage_5")
    source = STAGE_5.read_text(encoding="utf-8")
    before = source[: source.index("class Scheduler:")]
    exec(compile(before, STAGE_5, "exec"), vars(module))
    exec(compile(code, EDITOR, "exec"), vars(module))
    return module


def told(error: Exception) -> str:
    """An error of the reader's code in a line, with the line of the editor where it arose."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == EDITOR]
    if isinstance(error, SyntaxError) and error.filename == EDITOR:
        lines.append(error.lineno)
    at = f"line {lines[-1]}: " if lines else ""
    if isinstance(error, NotImplementedError):
        return f"{at}still open: {error}"
    if isinstance(error, Endless):
        return str(error)
    if isinstance(error, AssertionError):
        return f"{at}{error}"
    return f"{at}{type(error).__name__}: {error}"


class Endless(Exception):
    pass


@contextmanager
def bounded() -> Iterator[None]:
    """A loop of the reader's that does not end raises Endless."""
    left = MOST_LINES
    own: Counter[FrameType] = Counter()  # lines of each call that has not returned

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if event == "return":
            own.pop(frame, None)
            return line
        own[frame] += 1
        left -= 1
        if left < 0:
            [(stuck, _)] = own.most_common(1)
            raise Endless(
                f"line {stuck.f_lineno}: {stuck.f_code.co_name}() does not end; {MOST_LINES:,} lines have run"
            )
        return line

    sys.settrace(lambda frame, event, argument: line if frame.f_code.co_filename == EDITOR else None)
    try:
        yield
    finally:
        sys.settrace(None)


class Equals(ast.NodeTransformer):
    """Turns `assert a == b` into a call that says what a is, as pytest would."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        match node.test:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                text = ast.Constant(ast.unparse(node.test))
                call = ast.Expr(ast.Call(ast.Name("expect", ast.Load()), [left, right, text], []))
                return ast.fix_missing_locations(ast.copy_location(call, node))
        if node.msg is None:
            node.msg = ast.copy_location(ast.Constant(f"expected {ast.unparse(node.test)}"), node.test)
        return node


def expect(found: Any, wanted: Any, text: str) -> None:
    if found != wanted:
        raise AssertionError(f"expected {text}, but got {found!r}")


def tested(code: str) -> Iterator[dict[str, Any]]:
    """Run the model-free tests of stage 5 on the reader's class, each to its first failure."""
    tree = Equals().visit(ast.parse(TESTS.read_text(encoding="utf-8")))
    tests: dict[str, Any] = {"__name__": "tests_of_stage_5", "expect": expect}
    exec(compile(tree, TESTS, "exec"), tests)
    functions: dict[str, Callable[..., None]] = {name: f for name, f in tests.items() if name.startswith("test_")}
    for name, function in functions.items():
        message = ""
        try:
            with bounded():
                module = loaded(code)
                function(tests["rig"](SimpleNamespace(part=lambda name, module=module: getattr(module, name))))
        except Exception as error:
            message = told(error) or type(error).__name__
        words = name.removeprefix("test_").replace("_", " ")
        yield {"name": name, "words": words, "passed": not message, "message": message}
