"""Speculation in the control plane: random histories against the shadow KV, with guesses of any quality."""

import pytest

from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.guesses import NgramProposer
from nanovllm.engine.scheduler import Scheduler
from tests.engine.faults import Edit
from tests.engine.helpers import long_run, make, planned, sequence
from tests.engine.shadow import VOCAB_SIZE
from tests.engine.world import Guess, random_history

HISTORIES = 200


def right(coming: list[int], k: int) -> list[int]:
    return coming


def wrong(coming: list[int], k: int) -> list[int]:
    return [(token + 1) % VOCAB_SIZE for token in coming]


def alternating(coming: list[int], k: int) -> list[int]:
    """One right, one wrong, and so on."""
    return [(token + i % 2) % VOCAB_SIZE for i, token in enumerate(coming)]


@pytest.mark.parametrize("shard", [0, *(pytest.param(shard, marks=pytest.mark.slow) for shard in range(1, 6))])
def test_random_histories(shard: int) -> None:
    for seed in range(shard * HISTORIES, (shard + 1) * HISTORIES):
        try:
            random_history(seed, speculative=True)
        except Exception as error:
            error.add_note(f"random_history({seed}, speculative=True)")
            raise


FAULTS = {
    "rejected KV is taken for computed": Edit(Scheduler, "_roll_back", "seq.num_computed = seq.num_known - 1", "pass"),
    "blocks of rejected guesses stay taken": Edit(
        Scheduler, "_roll_back", "self.blocks.release(seq, num_kept=num_kept)", "[]"
    ),
    "the data plane is not told of the blocks that come instead": Edit(
        Scheduler, "_roll_back", "seq.num_blocks_sent = num_kept", "pass"
    ),
    "rejected KV is published": Edit(Scheduler, "commit", "end = seq.num_computed", "pass"),
    "guesses go past the end": Edit(
        Scheduler, "_speculate", "seq.limit - seq.num_known - 1", "seq.limit - seq.num_known"
    ),
    "guesses are not in the budget": Edit(Scheduler, "_speculate", "self._budget, room", "room"),
    "the masks after guesses are those of other guesses": Edit(
        LLMEngine, "_masks", "guesses.get(key, ())", "[0 for _ in guesses.get(key, ())]"
    ),
    "what is accepted behind an end is kept": Edit(
        Scheduler, "commit", "token_ids = seq.token_ids[num_known:]", "pass"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name].plant(monkeypatch)
    for seed in range(2 * HISTORIES):
        try:
            random_history(seed, speculative=True)
        except Exception:
            return
    pytest.fail(f"{2 * HISTORIES} random histories do not notice that {name}")


@pytest.mark.parametrize(
    ("guess", "lengths", "mean"),
    [
        (right, [4, 4, 4], 4.0),  # the prompt's own step guesses, too
        (wrong, [1] * 12, 1.0),
        (alternating, [2] * 6, 2.0),
    ],
)
def test_a_step_brings_the_accepted_guesses_and_one_token_more(guess: Guess, lengths: list[int], mean: float) -> None:
    world = make(bs=2, guess=guess, speculative={"method": "ngram", "k": 3})
    id = long_run(world, [1, 2, 3], 12)
    got = []
    while world.engine.has_unfinished():
        world.step()
        got += [len(event["ids"]) for event in world.events if event["type"] == "token"]
    assert got == lengths
    stats = world.outputs[id].metrics.speculation
    assert stats is not None and stats.mean_accepted_length == mean
    assert world.scheduler.speculation == stats


@pytest.mark.parametrize("guess", [right, alternating])
def test_the_counters_say_what_happened_also_where_a_run_is_cut(guess: Guess) -> None:
    """By hand: what was planned, and what of it came; an end of text among the guesses is the last to be accepted."""
    world = make(bs=2, seqs=1, guess=guess, speculative={"method": "ngram", "k": 4})
    num_cut = 0
    for start in range(VOCAB_SIZE):
        id, proposed, accepted, brought = world.add([start, 1], max_tokens=12), [0] * 4, [0] * 4, []
        while world.engine.has_unfinished():
            world.step()
            guesses = world.executor.plans[-1].scheduled[0].guesses
            ids: list[int] = next((event["ids"] for event in world.events if event["type"] == "token"), [])
            if guesses:
                brought.append(len(ids))
                num_right = sum(a == b for a, b in zip(guesses, ids, strict=False))
                num_cut += num_right == len(ids)
                for i in range(len(guesses)):
                    proposed[i] += 1
                    accepted[i] += i < num_right
        stats = world.outputs[id].metrics.speculation
        assert stats is not None and stats.num_steps == len(brought) and stats.num_tokens == sum(brought)
        assert stats.proposed == proposed[: len(stats.proposed)] and stats.accepted == accepted[: len(stats.accepted)]
    assert num_cut


def test_rejected_guesses_give_their_blocks_back() -> None:
    world = make(bs=2, guess=wrong, speculative={"method": "ngram", "k": 7})
    long_run(world, [1, 2, 3], 20)
    for _ in range(4):
        world.step()
        seq = sequence(world, "r0")
        assert len(seq.block_table) == -(-seq.num_computed // 2)
        assert planned(world)[0][2] > 7  # and yet they were there


def test_x2_rejected_slots_are_never_found() -> None:
    """A second request repeats the first one and its rejected guesses: it finds the former only."""
    world = make(bs=2, nb=64, guess=alternating, speculative={"method": "ngram", "k": 5})
    id = long_run(world, [1, 2, 3], 16)
    world.drain()
    output = world.outputs[id].outputs[0].token_ids
    for end in range(1, len(output)):
        again = long_run(world, [1, 2, 3, *output[:end], (output[end] + 1) % VOCAB_SIZE, 0, 0], 2)
        world.drain()  # which compares every slot that is read with what it should hold
        assert world.outputs[again].num_cached_tokens <= 3 + end + 1


def test_guesses_never_cost_anyone_else_a_place() -> None:
    """Of a budget of 6, three decodes and a prompt come first; what is left goes to guesses."""
    world = make(bs=4, mbt=6, guess=right, speculative={"method": "ngram", "k": 4})
    for start in range(3):
        long_run(world, [start], 40)
        world.step()
    assert sum(tokens for _, _, tokens in planned(world)) == 6
    long_run(world, [5, 6, 7], 4)
    world.step()
    assert [tokens for _, _, tokens in planned(world)] == [1, 1, 1, 3]
    world.drain()


def test_no_guess_follows_an_unfinished_prompt() -> None:
    """A chunk takes all the budget, and then the block of a decode, whose token in the budget is left over."""
    world = make(bs=2, nb=8, mbt=2, guess=right, speculative={"method": "ngram", "k": 2})
    long_run(world, [1], 14, priority=1)
    world.step()
    long_run(world, [2] * 12, 2)
    while not any(event["type"] == "preempted" for event in world.events):
        world.step()
    plan = world.executor.plans[-1]
    assert [(item.key, item.sample, item.guesses) for item in plan.scheduled] == [(1, False, ())]
    world.drain()


def test_nobody_is_preempted_for_a_guess() -> None:
    events = []
    world = make(bs=2, nb=12, guess=wrong, speculative={"method": "ngram", "k": 8})
    for start in range(3):
        long_run(world, [start], 7)
    while world.engine.has_unfinished():
        world.step()
        events += [event for event in world.events if event["type"] == "preempted"]
    assert not events and world.scheduler.speculation.num_steps


def test_the_ngram_proposer_continues_as_the_text_did() -> None:
    world = make(mbt=1)
    world.add([1, 2, 3, 4, 5, 1, 2, 3], max_tokens=4)
    seq = sequence(world, "r0")
    assert NgramProposer(3).propose(seq, 4) == [4, 5, 1, 2]
    seq.token_ids += [9, 9]
    assert NgramProposer(3).propose(seq, 4) == []
    seq.token_ids += [9, 9]
    assert NgramProposer(3).propose(seq, 4) == [9, 9, 9, 9]  # past its end, what matched is taken to repeat
    seq.token_ids += [1, 2, 3]
    assert NgramProposer(3).propose(seq, 2) == [9, 9]  # the latest place wins
