"""Masks that take longer than the model of their step, and the threads that compute them."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from unittest.mock import Mock

import pytest

from nanovllm.engine.masks import fill_masks
from nanovllm.engine.plan import Scheduled, StepPlan
from nanovllm.text.grammars import TokenGrammars, TokenMatcher
from nanovllm.text.tokenizer import Tokenizer
from tests.engine.test_grammars import EOS, SIZE, STORY_MODEL, PanicException, allowed, compiled, grammars, tokenizer

__all__ = ["grammars", "tokenizer"]  # fixtures


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Event, set[TokenMatcher]]]:
    """The masks of the matchers in the set take until the gate opens."""
    opened, slow, compute = Event(), set[TokenMatcher](), TokenMatcher.compute

    def gated(self: TokenMatcher, address: int, num_bytes: int) -> None:
        if self in slow:
            assert opened.wait(30)
        compute(self, address, num_bytes)

    monkeypatch.setattr(TokenMatcher, "compute", gated)
    yield opened, slow
    opened.set()


def test_masks_that_take_longer_than_the_device_are_late(
    tokenizer: Tokenizer, gate: tuple[Event, set[TokenMatcher]]
) -> None:
    opened, slow = gate
    grammars = TokenGrammars(tokenizer, SIZE, {EOS}, num_threads=4)
    first, *others = [compiled(grammars, regex="[a-c]+x").copy() for _ in range(4)]
    expected = grammars.fill([(other, ()) for other in others])
    slow.add(first)

    def is_busy() -> bool:
        return not all(other.has_mask for other in others)

    assert grammars.late([first, *others], 0, lambda: None) == [], "where the device cannot be asked, no mask is late"
    assert grammars.late([first, *others], 0, is_busy) == [first] and first.is_filling()
    assert grammars.fill([(other, ()) for other in others]) == expected and not any(m.is_filling() for m in others)
    assert grammars.late([first], 1, is_busy) == [first], "and it is computed once"
    opened.set()
    assert grammars.late([first], 0, is_busy) == [] and not first.is_filling()
    assert grammars.fill([(first, ())]) == expected[: len(expected) // 3]
    assert first.accept(grammars.tokenizer.encode("a")[0]) is None
    slow.clear()
    assert grammars.late([first], 0, is_busy) == []
    assert grammars.fill([(first, ())]) != expected[: len(expected) // 3], "the mask of another token"


def test_no_mask_is_late_while_the_device_is_busy_or_for_more_than_half_of_a_step(
    tokenizer: Tokenizer, gate: tuple[Event, set[TokenMatcher]]
) -> None:
    opened, slow = gate
    grammars = TokenGrammars(tokenizer, SIZE, {EOS}, num_threads=4)
    matchers = [compiled(grammars, regex="[a-c]+y").copy() for _ in range(3)]
    slow.update(matchers[:2])
    looks = iter(range(10**9))

    def is_busy() -> bool:
        if next(looks) == 3:
            opened.set()
        return True

    assert grammars.late(matchers, 1, is_busy) == [], "all have been waited for"
    assert next(looks) > 3
    opened.clear()
    for matcher in matchers:
        assert matcher.accept(grammars.tokenizer.encode("b")[0]) is None
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(grammars.late, matchers, 0, lambda: False)
        with pytest.raises(TimeoutError):  # two of three
            found.result(0.1)
        opened.set()
        assert len(found.result(30)) <= 1


def test_a_step_does_not_leave_a_sequence_for_one_that_is_over() -> None:
    grammars = Mock()
    grammars.late.return_value, grammars.fill.return_value = [], bytearray()
    plan = StepPlan(0, [Scheduled(key, key, 4, 1, True, ()) for key in range(3)], masked=[0, 1])
    scheduler = Mock(sequences={1: Mock(), 2: Mock()}, proposer=None)
    fill_masks(plan, Mock(), scheduler, grammars)
    (matcher,), num_others, _ = grammars.late.call_args.args
    assert matcher is scheduler.sequences[1].matcher and num_others == 1


def test_an_error_of_a_thread_that_fills_masks_is_met_again(
    grammars: TokenGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: TokenMatcher, address: int, num_bytes: int) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(TokenMatcher, "compute", failing)
    matcher = compiled(grammars, regex="[a-c]+z").copy()
    assert grammars.late([matcher], 0, lambda: False) == [] and len(allowed(grammars, matcher)[0]) > 2


def test_threads_that_fill_masks_end_with_their_grammars(tokenizer: Tokenizer) -> None:
    before = set(threading.enumerate())
    grammars = TokenGrammars(tokenizer, SIZE, {EOS}, num_threads=3)
    assert grammars.late([compiled(grammars, regex="a+")], 0, lambda: False) == []
    threads = set(threading.enumerate()) - before
    assert len(threads) == 3
    del grammars
    gc.collect()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


AT_EXIT = """
from pathlib import Path

from nanovllm import StructuredOutputsParams
from nanovllm.text.grammars import TokenGrammars
from nanovllm.text.tokenizer import Tokenizer

tokenizer = Tokenizer(Path({path!r}))
grammars = TokenGrammars(tokenizer, 4096, {{0}}, num_threads=4)
matchers = [grammars.compile(StructuredOutputsParams(regex=f"a[a-z ]{{{{{{i}}}}}}")).copy() for i in range(400, 430)]
for matcher in matchers:
    matcher.accept(tokenizer.encode("a")[0])
print(len(grammars.late([matcher.copy() for matcher in matchers for _ in range(200)], 10**6, lambda: False)))
"""


def test_python_exits_while_masks_are_computed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT.format(path=str(STORY_MODEL))], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "") and int(done.stdout) > 100


def test_a_mask_that_is_done_meanwhile_is_not_computed_again(
    grammars: TokenGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is done right after somebody has seen that the mask is not there."""
    matcher = compiled(grammars, regex="[a-c]+w").copy()
    there, computed = [False], list[TokenMatcher]()

    def has_mask(self: TokenMatcher) -> bool:
        seen = there[0]
        there[0], self.filling = True, False
        return seen

    monkeypatch.setattr(TokenMatcher, "compute", lambda self, *where: computed.append(self))
    del matcher.has_mask
    monkeypatch.setattr(TokenMatcher, "has_mask", property(has_mask, lambda self, value: None), raising=False)
    matcher.filling = True
    grammars.late([matcher], 1, lambda: False)
    time.sleep(0.05)
    assert not computed


def test_threads_that_fill_masks_keep_nothing(tokenizer: Tokenizer) -> None:
    grammars = TokenGrammars(tokenizer, SIZE, {EOS}, num_threads=1)
    matcher = compiled(grammars, regex="b+").copy()
    assert grammars.late([matcher], 0, lambda: False) == []
    gone = Event()
    weakref.finalize(matcher, gone.set)
    del matcher
    assert gone.wait(5)
