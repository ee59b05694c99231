"""Exercise 4a: whoever has the same salt shares, nobody else does, and the text is the same for all."""

from types import ModuleType
from typing import Any

import pytest
import xxhash

from stages.core import Event, SamplingParams, Sequence
from stages.stage_4_prefix_caching import Content

PROMPT = list(range(100, 170))
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture
def served(answers: ModuleType, story_model: str) -> Any:
    """Serve a prompt under a salt -> its tokens, and how many of the prompt's came from the cache."""
    events: list[Event] = []
    engine = answers.SaltedEngine(story_model, block_size=16, num_blocks=64, on_event=events.append)

    def serve(salt: str, prompt: list[int] = PROMPT) -> tuple[list[int], int]:
        events.clear()
        [tokens] = engine.generate_for(salt, [prompt], GREEDY)
        return tokens, next(e["cached"] for e in events if e["type"] == "admitted")

    return serve


def test_a_customer_finds_what_it_has_sent_before_and_nobody_else_does(served: Any) -> None:
    tokens, found = served("ann")
    assert found == 0
    assert served("ann") == (tokens, 64), "the same salt must find all four full blocks"
    assert served("bob") == (tokens, 0), "another salt must find nothing, and get the same text"
    assert served("") == (tokens, 0), "without a salt one must not find what was sent with one"
    assert served("bob") == (tokens, 64) and served("") == (tokens, 64) and served("ann") == (tokens, 64)


def test_the_salt_reaches_every_block_of_the_chain(served: Any) -> None:
    served("ann")
    served("bob", PROMPT[:16] + [7] * 40)
    assert served("bob")[1] == 16, "only the first block is bob's own; the rest is ann's"


def test_equal_digests_of_two_salts_do_not_mix_them(answers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xxhash, "xxh64_intdigest", lambda data: 5)
    pool = answers.SaltedPool(num_blocks=8, block_size=2)
    for salt in ("ann", "bob"):
        pool.salt = salt
        seq = Sequence(0, [1, 2, 3], 3, GREEDY, 0)
        assert pool.find_prefix(seq) == [], f"{salt} found another's block by its digest alone"
        assert pool.allocate(seq, 3)
        seq.num_computed = 3
        pool.publish(seq)
        pool.release(seq)


def test_every_salt_has_one_root_of_its_own(answers: ModuleType) -> None:
    pool = answers.SaltedPool(num_blocks=8, block_size=2)
    roots: set[Content | None] = set()
    for salt in ("ann", "", "bob"):
        pool.salt = salt
        roots.add(pool.root())
        content: Content = pool.describe(None, (1, 2))
        assert content.parent is pool.root() and content not in roots
    assert len(roots) == 3
