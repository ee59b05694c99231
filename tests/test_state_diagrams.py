"""The state diagrams say what the code does, and all that it does."""

import pytest

from nanovllm.engine.sequence import SequenceStatus
from tools.pictures.state_diagrams import BLOCK_STATES, block_arrows, diagrams, mermaid, sequence_arrows


def test_what_becomes_of_a_sequence() -> None:
    assert sequence_arrows() == {
        ("[*]", "waiting", "added"),
        ("waiting", "running", "admitted"),
        ("waiting", "finished", "finished abort"),
        ("running", "waiting", "preempted"),
        *(("running", "finished", f"finished {reason}") for reason in ("abort", "stop", "length", "error")),
        ("finished", "[*]", ""),
    }


def test_what_becomes_of_a_block() -> None:
    empty, findable, used, used_findable, shared = BLOCK_STATES
    assert block_arrows() == {
        ("[*]", empty, ""),
        (empty, used, "grow"),
        (used, empty, "release"),
        (used, used_findable, "publish"),
        (used_findable, findable, "release"),
        (used_findable, empty, "release"),  # after an error nothing of it is to be found again
        (findable, used, "grow"),
        (findable, used_findable, "share"),
        (used_findable, shared, "share"),
        (shared, used_findable, "release"),
    }


def test_the_text_names_every_state_once_and_joins_labels() -> None:
    text = mermaid({("[*]", "a", ""), ("a", "b", "x"), ("a", "b", "w")}, ["a", "b"])
    assert text == "stateDiagram-v2\n    s0 : a\n    s1 : b\n    [*] --> s0\n    s0 --> s1 : w, x\n"
    assert all(status.value in diagrams()["A sequence"] for status in SequenceStatus)


def test_a_state_that_never_occurs_is_an_error() -> None:
    with pytest.raises(ValueError, match="let `drive` do more"):
        mermaid({("[*]", "a", "")}, ["a", "b"])
