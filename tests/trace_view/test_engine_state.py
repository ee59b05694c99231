"""Followed by its events alone, every sequence holds the blocks that the engine's own tables say."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from nanovllm.trace_view.engine_state import EngineState
from stages.core import Event, SamplingParams
from stages.manifest import load_stage
from tests.engine.world import World, random_history
from tools.pictures.three_requests import STORY_MODEL, load_tokenizer


def held(state: EngineState) -> dict[Any, list[int]]:
    """By request and choice. The two ways to ask, by sequence and by block, must agree."""
    owners = Counter(block for table in state.tables.values() for block in table)
    assert owners == {block: len(sequences) for block, sequences in state.owners.items()}
    assert all(block in state.tables[s] for block, sequences in state.owners.items() for s in sequences)
    return {state.names[sequence]: table for sequence, table in state.tables.items()}


# --- the engine ------------------------------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Makes every `World` compare its sequences' tables with the events' after each step; counts what happened."""
    count: Counter[str] = Counter()
    make, check = World.__init__, World.check

    def followed(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.state, tell = EngineState(), self.engine.trace.on_event
        before: Event = {}

        def hear(event: Event) -> None:
            tell(event)
            self.state.hear(event)
            count[event["type"]] += 1
            count["an abort"] += event.get("reason") == "abort"
            count["a second choice"] += event["choice"] > 0
            count["shared"] += bool(event.get("shared"))
            freed, over = bool(before.get("freed")), event["type"] in ("preempted", "finished")
            count["wrong guesses"] += freed and not over
            before.clear()
            before.update(event)

        self.engine.trace.on_event = hear

    def compared(self: Any) -> None:
        check(self)
        running = [seq for seq in self.scheduler.running if seq.block_table]
        assert held(self.state) == {(seq.request_id, seq.choice): seq.block_table for seq in running}
        status = dict(zip(self.state.names, self.state.status, strict=True))
        assert all(status[s.request_id, s.choice] == s.status.value for s in self.scheduler.sequences.values())
        counts = self.scheduler.blocks.ref_counts
        assert [len(self.state.owners.get(block, [])) for block in range(len(counts))] == counts

    monkeypatch.setattr(World, "__init__", followed)
    monkeypatch.setattr(World, "check", compared)
    return count


@pytest.mark.parametrize("speculative", [False, True])
def test_random_histories_of_the_engine(speculative: bool, seen: Counter[str]) -> None:
    for seed in range(25):
        random_history(seed, speculative)
    wanted = {"preempted", "finished", "an abort", "a second choice", "shared"}
    assert not [kind for kind in wanted | ({"wrong guesses"} if speculative else set()) if not seen[kind]], seen


def test_an_engine_that_gives_up_leaves_nothing(seen: Counter[str]) -> None:
    """`abort_all` ends also choices that wait for the first one and were never added."""
    world: Any = World(kvcache_block_size=2, num_kv_blocks=8, max_num_seqs=2)
    world.add([1, 2, 3, 4, 5], n=3)
    world.step()
    assert held(world.state)
    world.engine.abort_all()
    assert not held(world.state) and seen["an abort"] == 3


# --- the stages ------------------------------------------------------------------------------------------------------


def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer()
    common = tokenizer.encode("Once upon a time there was a sparrow.").ids
    return [common + tokenizer.encode(end).ids for end in ("One day", "At night", "Her friend", "A gust of wind")]


def compared_stage(number: int, state: EngineState, on_event: Callable[[Event], None]) -> Any:
    """The stage's engine, whose sequences' tables are compared with the events' at the start of every step."""
    seqs: dict[int, Any] = {}

    def hear(event: Event) -> None:
        if event["type"] == "scheduled":  # what this step takes and gives back has been told by now
            assert held(state) == {(i, 0): seq.block_table for i, seq in seqs.items() if seq.block_table}
        state.hear(event)
        on_event(event)

    engine = load_stage(number).engine_class()(STORY_MODEL, on_event=hear, block_size=4, num_blocks=14)
    allocate = engine.pool.allocate

    def watched(seq: Any, num_tokens: int) -> bool:
        seqs[seq.request] = seq
        return bool(allocate(seq, num_tokens))

    engine.pool.allocate = watched
    return engine


@pytest.mark.parametrize("number", [3, 4, 5])
def test_runs_of_a_stage(number: int) -> None:
    """Two calls, so that request 0 comes twice; a small pool, so that in stage 5 some are preempted."""
    state, kinds = EngineState(), Counter[str]()

    def count(event: Event) -> None:
        kinds[event["type"]] += 1
        kinds["hit"] += bool(event.get("shared"))

    engine = compared_stage(number, state, count)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (6, 12, 3, 5)]
    for call in (1, 2):
        engine.generate(prompts(), params)
        assert not state.tables and len(state.names) == 4 * call
    assert (kinds["preempted"] > 0) == (number == 5) and (kinds["hit"] > 0) == (number > 3)


def test_an_interrupted_call_leaves_nothing() -> None:
    """No event ends its sequences; what the pool gets back belongs to nobody."""
    state = EngineState()

    def interrupt(event: Event) -> None:
        if event["type"] == "token" and max(map(len, state.owners.values())) > 1:
            raise KeyboardInterrupt

    engine = compared_stage(4, state, interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts(), SamplingParams(temperature=0, max_tokens=8))
    assert not state.tables
