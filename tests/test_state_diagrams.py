"""The state diagrams say what the code does, and all that it does."""

from nanovllm.engine.sequence import SequenceStatus
from tests.state_arrows import BLOCK_STATES, block_arrows, sequence_arrows


def test_what_becomes_of_a_sequence() -> None:
    assert sequence_arrows() == {
        ("[*]", "waiting", "added"),
        ("waiting", "running", "admitted"),
        ("waiting", "finished", "finished abort"),
        ("running", "waiting", "preempted"),
        *(("running", "finished", f"finished {reason}") for reason in ("abort", "stop", "length", "error")),
        ("finished", "[*]", ""),
    }
    assert {state for arrow in sequence_arrows() for state in arrow[:2]} == {
        "[*]",
        *(status.value for status in SequenceStatus),
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
