"""What the tests of the engine on several ranks share: engines, a checkpoint that hurts, comparisons with one rank."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.workers.parallel_executor import ParallelExecutor
from nanovllm.workers.spawned_team import SpawnedTeam
from tests.engine.test_llm_invariance import check_close, check_same
from tests.stages.ranks import RANKS, awkward_checkpoint, check_gone

STORY_MODEL = Path(__file__).parents[2] / "assets" / "story_model"
BAD = 510  # the token whose vector in `poisoned_checkpoint` is not a number

# Little more memory than the longest request needs, and small steps: everybody is cut into chunks and preempted.
TINY: dict[str, Any] = {
    "kvcache_block_size": 4, "num_kv_blocks": 11, "max_num_seqs": 5, "max_num_batched_tokens": 12, "max_model_len": 44,
}  # fmt: skip
ROOMY: dict[str, Any] = {"kvcache_block_size": 4, "num_kv_blocks": 200, "max_model_len": 128}

# Every option there is, and every tail: plain greedy, plain with a temperature, and full.
MANY = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=2, max_tokens=9, ignore_eos=True, top_p=0.9, logprobs=0),
    SamplingParams(temperature=1.0, seed=3, max_tokens=8, n=2, logprobs=4, min_tokens=5),
    SamplingParams(temperature=1.2, seed=4, max_tokens=9, ignore_eos=True, top_k=7, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, seed=5, max_tokens=9, min_p=0.05, frequency_penalty=0.5, presence_penalty=0.4),
    SamplingParams(temperature=0, max_tokens=7, logprobs=2, prompt_logprobs=3, min_tokens=7, repetition_penalty=1.1),
]
MANY_PROMPTS = [[(37 * i + j) % 500 for j in range(3 * i + 1)] for i in range(len(MANY))]


class Starter:
    """Engines on several ranks, in float32. The shared ones live until the module's end, or somebody's."""

    def __init__(self, size: int, device: str) -> None:
        self.size, self.device = size, device
        self.kept: dict[str, LLM] = {}

    def __call__(self, path: Path, **config: Any) -> LLM:
        config = {"device": self.device, "dtype": "float32", "skip_tokenizer_init": True} | config
        return LLM(path, tensor_parallel_size=self.size, **config)

    def shared(self, path: Path, **config: Any) -> LLM:
        """The engine that an earlier test was given, if it still lives."""
        name = f"{path} {config}"
        if name not in self.kept or not executor_of(self.kept[name]).team.close.alive:
            self.kept[name] = self(path, **config)
        return self.kept[name]

    def close(self) -> None:
        for llm in self.kept.values():
            llm.close()


@pytest.fixture(scope="module", params=RANKS)
def start(request: pytest.FixtureRequest) -> Iterator[Starter]:
    with closing(Starter(*request.param)) as starter:
        yield starter


@pytest.fixture(scope="session")
def engine_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "engine-checkpoints"


def poisoned_checkpoint(directory: Path) -> Path:
    """`awkward_checkpoint` (511 tokens, biases everywhere, one key/value head, negative logits), with a token that no
    model can read, and that none of its outputs contains."""
    path = directory / "poisoned"
    if not path.exists():
        shutil.copytree(awkward_checkpoint(directory), path)
        tensors = load_file(path / "model.safetensors")
        tensors["model.embed_tokens.weight"][BAD] = float("nan")
        tensors["lm_head.weight"][BAD, 0] = -80.0
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def executor_of(llm: LLM) -> ParallelExecutor:
    executor = llm.engine.executor
    assert isinstance(executor, ParallelExecutor)
    return executor


def team_of(llm: LLM) -> SpawnedTeam:
    team = executor_of(llm).team
    assert isinstance(team, SpawnedTeam)
    return team


def pids_of(llm: LLM) -> list[int]:
    pids = [worker.pid for worker in team_of(llm)._workers.values()]
    return [pid for pid in pids if pid is not None]


def segments_of(llm: LLM) -> list[str]:
    return [segment.name for segment in team_of(llm)._segments]


def check_closed(llm: LLM, pids: list[int], segments: list[str]) -> None:
    """Nothing is left of an engine, it says that it is closed, and to close it again does nothing."""
    check_gone(pids, segments)
    with pytest.raises(RuntimeError, match="this engine is closed"):
        llm.generate([[1]], use_tqdm=False)
    llm.close()


def check_idle(llm: LLM) -> None:
    """Nothing is held when nothing runs."""
    core, executor = llm.engine, executor_of(llm)
    assert not core.has_unfinished() and not core.scheduler.running and not core.scheduler.sequences
    assert core.scheduler.blocks.num_free == core.scheduler.blocks.num_blocks and not executor.sequences


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


def check_equal(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Token for token; and log-probabilities as near as the order of additions allows."""
    assert tokens(found) == tokens(expected)
    for ours, theirs in zip(found, expected, strict=True):
        if theirs.prompt_logprobs is None:
            assert ours.prompt_logprobs is None
        else:
            assert ours.prompt_logprobs is not None and ours.prompt_logprobs[0] is None
            check_close(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:])
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
            if one.logprobs is not None:
                check_same(one, other)
