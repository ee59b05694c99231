"""The elective on sliding windows: each of its parts, then Hugging Face's tokens under all circumstances, and what is
given back when."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.core import Event, Sequence, Trace
from tests import oracle
from tests.electives.subject import ElectiveSubject, make_subject
from tests.oracle_record import record_alone
from tests.stages import conformance
from tests.stages.conformance import Conformance, run
from tests.stages.events import Listener, Told
from tests.stages.requests import PROMPTS, TIGHT, greedy, random_prompts
from tests.weights import lively_qwen3, random_mistral, random_qwen2, windowed_qwen3

STORY_MODEL = Path(__file__).parents[2] / "assets" / "story_model"
SLOW = pytest.mark.slow
Build = Callable[..., Path]
LONG = random_prompts(60, 40, 3, 57, 24, seed=2)


def two_kinds_and_full(directory: Path | str, **over: Any) -> Path:
    """As in Gemma 3: five layers with a window, then one that sees all."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = {"num_hidden_layers": 6, "layer_types": kinds, "use_sliding_window": True, "sliding_window": 5}
    return random_qwen2(directory, **config | over)


@dataclass(frozen=True)
class Windowed(ElectiveSubject):
    def check_idle(self, engine: Any) -> None:
        """Nothing is held in any pool when nothing runs."""
        assert not engine.scheduler.waiting and not engine.scheduler.running
        for pool in engine.pool.pools:
            free = sorted(pool.free_list)
            assert free == list(range(pool.num_blocks)), f"free when idle, window {pool.window}: {free}"
            assert not any(pool.ref_counts) and not pool.tables


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Any:
    found = make_subject("windows", request.config.getoption("impl"))
    return Windowed(found.elective, found.package)


class WindowListener(Listener):
    """Blocks may be given back while their request runs, and shared ones belong to no particular place."""

    def on_blocks(self, told: Told, event: Event) -> None:
        table = self.tables.setdefault(event["request"], [])
        others = {block for request, t in self.tables.items() if t is not table for block in t}
        new = event["shared"] + event["taken"]
        assert len(set(new + table)) == len(new + table), f"a block twice in one table: {event}"
        assert not others & set(event["taken"]), f"taken, but in use: {event}"
        assert not (new and event["freed"]) and set(event["freed"]) <= set(table) - others, event
        table += new
        # A block that another still holds is given up without a word: the listener keeps it until that one is done
        self.tables[event["request"]] = [block for block in table if block not in event["freed"]]


def make_pools(subject: Any, windows: tuple[int, ...], num_blocks: int = 12, chunk: int = 64) -> Any:
    """Pools with blocks of 4, one for each window."""
    pools = [subject.module.WindowPool(num_blocks, 4, window, 100 * i) for i, window in enumerate(windows)]
    return subject.module.Pools(pools, chunk, Trace(None))


def new_sequence(token_ids: list[int], request: int = 0) -> Sequence:
    return Sequence(request, list(token_ids), len(token_ids), greedy(8), seed=0)


def compute(pools: Any, seq: Sequence, num_tokens: int) -> None:
    """What a step does, without a model."""
    assert pools.allocate(seq, num_tokens)
    seq.num_computed = num_tokens
    pools.publish(seq)
    pools.release_unseen(seq)


# --- the parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 1, 2, 3, 7, 20])
def test_a_query_sees_its_window_and_nothing_later(subject: Any, window: int) -> None:
    """A window of 3 is the key itself and two before it, as in Hugging Face's masks."""
    queries, keys = torch.arange(4, 12), torch.arange(2, 12)
    mask = subject.module.see(queries[:, None], keys, window)
    assert mask.dtype == torch.bool and mask.shape == (8, 10)
    for q, row in zip(queries.tolist(), mask.tolist(), strict=True):
        seen = [k for k, visible in zip(keys.tolist(), row, strict=True) if visible]
        expected = [k for k in keys.tolist() if k <= q and (not window or k > q - window)]
        assert seen == expected, f"window {window}: query {q} sees {seen}, and should see {expected}"


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("window", [0, 1, 2, 4, 5, 9])
def test_needed_blocks_are_those_with_a_key_that_is_still_seen(subject: Any, window: int, block_size: int) -> None:
    pool = subject.module.WindowPool(8, block_size, window, 0)
    for computed in range(25):
        for length in (computed + 1, computed + 6, *([computed] if computed % block_size == 0 else [])):
            seen = range(max(0, computed - window + 1) if window else 0, length)
            expected = sorted({position // block_size for position in seen})
            found = list(pool.needed(computed, length))
            told = f"window {window}, blocks of {block_size}, {computed} computed, up to token {length}"
            assert found == expected, f"{told}: needed are {expected}, not {found}"


def test_blocks_go_as_the_window_moves_on(subject: Any) -> None:
    """Blocks of 4, a window of 5: the query at 8 sees 4 to 8, so that block 0 is over when 8 tokens are computed."""
    pools, seq = make_pools(subject, (0, 5)), new_sequence([*range(30)])
    full, local = pools.pools
    for num_tokens, blocks in ((3, [0]), (7, [0, 1]), (8, [1]), (11, [1, 2]), (12, [2]), (30, [6, 7])):
        compute(pools, seq, num_tokens)
        assert sorted(local.tables[seq]) == blocks, f"{num_tokens} computed"
        assert sorted(full.tables[seq]) == list(range(-(-num_tokens // 4)))
        assert len(local.free_list) == 12 - len(blocks)
    pools.release(seq)
    assert not local.tables and not full.tables and len(local.free_list) == len(full.free_list) == 12


def test_a_beginning_is_found_by_what_the_windows_still_see(subject: Any) -> None:
    """A pool of 3 blocks has the last of a text of 7 blocks: enough after its end for a window of 9, not for one of 14,
    and not in its middle."""
    text = [*range(28)]
    for window, hit in ((9, 28), (14, 0), (0, 0)):
        pools = make_pools(subject, (window,))
        seq = new_sequence(text)
        compute(pools, seq, 28)
        pools.release(seq)
        [pool] = pools.pools
        for name in [name for name in pool.block_of if name.token_ids[0] < 16]:
            del pool.block_of[name]
        again = new_sequence([*text, 1, 2])
        assert pools.allocate(again, 30)
        assert again.num_computed == hit, f"window {window}: {hit} tokens are cached, and {again.num_computed} found"
        pools.release(again)
        other = new_sequence([*text[:20], 1, 2])
        assert pools.allocate(other, 22) and other.num_computed == 0
    assert sorted(pools.pools[0].tables[other]) == [*range(6)]


def test_all_kinds_of_layers_must_have_what_they_need(subject: Any) -> None:
    """The layers that see all lack the last block, or those with a window one in the middle."""
    text = [*range(24)]
    for lacking, index, hit in ((0, 5, 20), (0, 0, 0), (1, 5, 20), (1, 4, 16), (1, 0, 24)):
        pools = make_pools(subject, (0, 6))
        seq = new_sequence(text)
        compute(pools, seq, 24)
        pools.release(seq)
        pool = pools.pools[lacking]
        names = pools.beginnings(seq, 6)
        del pool.block_of[names[index]]
        count, shared = pools.find_beginning(names)
        assert count * 4 == hit, f"pool {lacking} lacks block {index}: {hit} tokens are cached, and {count * 4} found"
        assert [sorted(blocks) for blocks in shared] == [[*range(count)], [*range(count)][-2:] if count else []]
        for pool, blocks in zip(pools.pools, shared, strict=True):
            assert blocks == {i: pool.block_of[names[i]] for i in blocks}


def test_the_same_block_after_another_beginning_is_not_found(subject: Any) -> None:
    """Though the window sees only blocks that are equal: what they hold depends on what comes before."""
    pools = make_pools(subject, (4,))
    seq = new_sequence([9, 9, 9, 9, *range(8)])
    compute(pools, seq, 12)
    pools.release(seq)
    other = new_sequence([7, 9, 9, 9, *range(8), 5])
    assert pools.allocate(other, 13) and other.num_computed == 0
    same = new_sequence([9, 9, 9, 9, *range(8), 5])
    assert pools.allocate(same, 13) and same.num_computed == 12


def test_a_shared_block_stays_until_the_last_gives_it_back(subject: Any) -> None:
    pools = make_pools(subject, (5,))
    [pool] = pools.pools
    first = new_sequence([*range(12)], request=0)
    compute(pools, first, 12)
    second = new_sequence([*range(12), 1], request=1)
    assert pools.allocate(second, 13) and second.num_computed == 12
    [shared] = set(pool.tables[first].values()) & set(pool.tables[second].values())
    assert pool.ref_counts[shared] == 2
    pools.release(first)
    assert shared not in pool.free_list
    pools.release(second)
    assert shared in pool.free_list and not any(pool.ref_counts)


def test_what_a_window_has_passed_can_be_found_until_it_is_taken(subject: Any) -> None:
    """Another text with the same beginning finds blocks that the first has given back, while it still runs."""
    pools = make_pools(subject, (5,), num_blocks=10)
    long, short = new_sequence([*range(28)], request=0), new_sequence([*range(8), 77], request=1)
    compute(pools, long, 28)
    assert pools.allocate(short, 9) and short.num_computed == 8
    tables = pools.pools[0].tables
    assert sorted(tables[long]) == [6] and sorted(tables[short]) == [1, 2]
    assert pools.pools[0].ref_counts.count(1) == 3


# --- the whole --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "window"),
    [
        (two_kinds_and_full, 5),
        *(
            pytest.param(build, window, marks=SLOW)
            for window in range(1, 10)
            for build in (random_mistral, windowed_qwen3)
        ),
    ],
)
def test_tokens_are_hf_s_with_chunks_hits_and_preemption(
    subject: Any, checkpoints: Path, build: Build, window: int
) -> None:
    """In company, in pools far too small; and continued, where the cache has what the first time has left."""
    told: list[Event] = []
    path, params = build(checkpoints, sliding_window=window), greedy(20, ignore_eos=True)
    fewest = (window - 1 + 10 - 2) // 4 + 2  # of a window and a chunk of 10, in blocks of 4
    options = TIGHT | {"num_blocks": 20, "num_window_blocks": fewest, "max_num_seqs": 16, "on_event": told.append}
    prompts = [*PROMPTS, *LONG]
    outputs = run(subject, path, prompts, params, **options)
    assert any(event["type"] == "preempted" for event in told) or window == 1
    engine = subject.engine(path, **options | {"num_blocks": 96, "num_window_blocks": 40})
    assert engine.generate(prompts, params) == outputs
    told.clear()
    longer = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)][::-1]
    oracle.check_greedy(path, longer, engine.generate(longer, greedy(4)), greedy(4))
    assert sum(event["cached"] for event in told if event["type"] == "admitted") > 100
    subject.check_idle(engine)


def test_given_windows_take_the_place_of_the_model_s_own(subject: Any, checkpoints: Path) -> None:
    """The logits at every position are those of Hugging Face's model that has these windows in its config.json."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = {"use_sliding_window": True, "sliding_window": 6, "layer_types": kinds}
    judge = oracle.truth(lively_qwen3(checkpoints, **config))
    [prompt] = random_prompts(30)
    for path, windows in ((lively_qwen3(checkpoints), (6, 0, 6)), (lively_qwen3(checkpoints, **config), None)):
        engine = subject.engine(path, windows=windows, **TIGHT)
        assert engine.windows == (6, 0, 6)
        output, recorder = record_alone(engine, prompt, greedy(12, ignore_eos=True))
        known = prompt + output[:-1]
        ours = recorder.logits_by_position(known)
        oracle.check_logits(torch.stack([ours[p] for p in range(len(known))]), judge.logits(known))


def test_a_long_answer_takes_the_blocks_of_its_window(subject: Any, checkpoints: Path) -> None:
    """A text of 150 tokens in pools of 3 and 38 blocks; without a window it needs 38 everywhere."""
    told: list[Event] = []
    path = windowed_qwen3(checkpoints, sliding_window=6)
    options: dict[str, Any] = {"block_size": 4, "num_blocks": 38, "max_num_batched_tokens": 3, "on_event": told.append}
    engine = subject.engine(path, num_window_blocks=3, **options)
    output = engine.generate([[1, 2, 3]], greedy(148, ignore_eos=True))
    oracle.check_greedy(path, [[1, 2, 3]], output, greedy(148, ignore_eos=True))
    blocks = [event for event in told if event["type"] == "blocks"]
    local = [block for event in blocks for block in event["taken"] if block >= 38]
    assert len(local) == 38 and set(local) == {38, 39, 40}
    assert engine.caches[0].k.shape[:2] == (1, 38) and engine.caches[6].k.shape[:2] == (2, 3)
    with pytest.raises(ValueError, match=r"prompts\[0\]: 152 tokens need up to 38 blocks.*window 0, which have 37"):
        subject.engine(path, num_window_blocks=3, **options | {"num_blocks": 37}).generate([[1, 2, 3]], greedy(150))
    with pytest.raises(ValueError, match=r"need up to 3 blocks of 4 in layers with window 6, which have 2"):
        subject.engine(path, num_window_blocks=2, **options).generate([[1, 2, 3]], greedy(148))


def test_a_long_prompt_takes_no_more_than_a_chunk_and_a_window(subject: Any, checkpoints: Path) -> None:
    path = random_mistral(checkpoints)
    prompts = random_prompts(90, 70, seed=3)
    run(subject, path, prompts, greedy(5), **TIGHT | {"num_blocks": 5})  # (8 - 1 + 10) tokens from anywhere


@pytest.mark.parametrize("window", [1, 6])
def test_a_prompt_that_is_cached_to_its_end_still_computes_a_token(
    subject: Any, checkpoints: Path, window: int
) -> None:
    """With windows of 1 in all layers nothing has to be cached: what comes next depends on the last token alone."""
    told: list[Event] = []
    path = random_mistral(checkpoints, sliding_window=window)
    engine, prompts = subject.engine(path, **TIGHT, on_event=told.append), random_prompts(24)
    for cached in (20 if window == 1 else 0, 20):
        oracle.check_greedy(path, prompts, engine.generate(prompts, greedy(5)), greedy(5))
        assert [event["cached"] for event in told if event["type"] == "admitted"] == [cached]
        told.clear()


def test_events_and_outputs_of_interleaved_requests(subject: Any, checkpoints: Path) -> None:
    listener = WindowListener()
    options = TIGHT | {"num_blocks": 12, "on_event": listener}
    engine = subject.engine(windowed_qwen3(checkpoints), **options)
    params = [greedy(n, ignore_eos=True) for n in (1, 9, 4, 12, 2, 7)]
    outputs = engine.generate(PROMPTS, params)
    listener.check_end(PROMPTS, outputs, params, engine.eos_token_ids)
    freed = [e for e in listener.events if e["type"] == "blocks" and e["freed"]]
    assert len(freed) > len(PROMPTS), "some are given back while their requests run"


@SLOW
class TestConformance(Conformance):
    """The suite of the stages, whose models have windows now."""

    test_chats_are_hf_s = None  # type: ignore[assignment]  # there is no such model of this kind

    @pytest.fixture
    def story_model(self) -> Path:
        return STORY_MODEL

    @pytest.mark.parametrize("number", [5])
    def test_stories_are_hf_s(self, subject: Any, story_model: Path, number: int) -> None:
        super().test_stories_are_hf_s(subject, story_model, number)

    @pytest.fixture(autouse=True)
    def models(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(conformance, "lively_qwen3", windowed_qwen3)
        monkeypatch.setattr(conformance, "random_llama", random_mistral)
        monkeypatch.setattr(conformance, "Listener", WindowListener)

    @pytest.mark.parametrize(
        "build", [random_mistral, windowed_qwen3, two_kinds_and_full, partial(random_mistral, sliding_window=None)]
    )
    def test_greedy_tokens_are_hf_s(self, subject: Any, checkpoints: Path, build: Build) -> None:
        super().test_greedy_tokens_are_hf_s(subject, checkpoints, build)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_tokens(subject: Any, checkpoints: Path) -> None:
    options: dict[str, Any] = TIGHT | {"device": "cuda", "dtype": torch.float32}
    run(subject, windowed_qwen3(checkpoints), PROMPTS, greedy(12, ignore_eos=True), **options)


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "config", "windows"),
    [
        (random_mistral, {}, (8, 8, 8)),
        (random_mistral, {"sliding_window": None}, (0, 0, 0)),
        (random_mistral, {"sliding_window": 3}, (3, 3, 3)),
        (lively_qwen3, {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}, (0, 0, 0)),
        (lively_qwen3, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, (0, 0, 8)),
    ],
)
def test_windows_are_read_as_hugging_face_reads_them(
    subject: Any, tmp_path: Path, checkpoints: Path, build: Build, config: dict[str, Any], windows: tuple[int, ...]
) -> None:
    """With the list of layers that transformers 5 writes, and without it, as before."""
    path = build(checkpoints, **config)
    assert subject.module.read_windows(path) == windows
    raw = json.loads((path / "config.json").read_text())
    raw.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert subject.module.read_windows(tmp_path) == windows


def test_a_list_of_layers_decides_for_mistral_as_well(subject: Any, tmp_path: Path, checkpoints: Path) -> None:
    raw = json.loads((random_mistral(checkpoints) / "config.json").read_text())
    raw["layer_types"] = ["full_attention", "sliding_attention", "full_attention"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert subject.module.read_windows(tmp_path) == (0, 8, 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False}, "sliding_window 0"),
        ({"layer_types": ["sliding_attention"] * 2}, "3 layers, sliding_window 8, layer_types"),
        ({"sliding_window": 0, "layer_types": ["sliding_attention"] * 3}, "sliding_window 0"),
    ],
)
def test_other_windows_are_refused(subject: Any, tmp_path: Path, checkpoints: Path, config: Any, message: str) -> None:
    path = shutil.copytree(windowed_qwen3(checkpoints), tmp_path / "copy")
    raw = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        subject.engine(path)


def test_an_option_that_is_none_is_refused(subject: Any, checkpoints: Path) -> None:
    path = lively_qwen3(checkpoints)
    for windows in ((8, 8), (8, 8, -1)):
        with pytest.raises(ValueError, match="windows must be 3 numbers from 0 on"):
            subject.engine(path, windows=windows)
    with pytest.raises(ValueError, match="num_window_blocks must be at least 1, got 0"):
        subject.engine(path, num_window_blocks=0)


def test_stages_refuse_it(checkpoints: Path) -> None:
    from stages.checkpoint import load_model

    with pytest.raises(ValueError, match="sliding-window attention is not supported"):
        load_model(windowed_qwen3(checkpoints))
