"""What bad input gets from `LLM`, and what an interruption leaves behind."""

import gc
import json
import shutil
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from tests.weights import lively_qwen3

STORY_MODEL = Path(__file__).parents[2] / "assets" / "story_model"
PROMPT = list(range(1, 40))
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL = {"num_kv_blocks": 8, "kvcache_block_size": 16, "max_model_len": 200, "max_num_seqs": 2}
BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    return []


@pytest.fixture(scope="module")
def llm(events: list[dict[str, Any]]) -> Iterator[LLM]:
    with LLM(STORY_MODEL, **SMALL, on_event=events.append) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_qwen3(tmp_path_factory.getbasetemp() / "engine-checkpoints")


def tokens(llm: LLM, prompts: Any = PROMPT) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def check_idle(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_unfinished() and not scheduler.sequences and not scheduler.running
    assert len(scheduler.waiting) == 0
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks and not any(scheduler.blocks.ref_counts)
    assert not getattr(llm.engine.executor, "sequences")  # noqa: B009


# --- bad input -------------------------------------------------------------------------------------------------------

P = SamplingParams
ONE = P(max_tokens=1)
# prompts, more arguments of `generate`, the error, and what it must say: argument, value, remedy
BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "empty text": (["a", ""], {}, ValueError, (r"prompts[1]", "prompt_token_ids is empty", "at least one token")),
    "empty ids": ([[1], []], {}, ValueError, ("prompts[1]", "prompt_token_ids is empty", "at least one token")),
    "id too large": ([[1], [2, 4096]], {}, ValueError, ("prompts[1]", "4096", "0 to 4095", "tokenizer")),
    "negative id": ([[-1, 2]], {}, ValueError, ("prompts[0]", "contains -1", "0 to 4095", "tokenizer")),
    "ids that are no integers": ([[1.5]], {}, TypeError, ("prompts[0]", "prompt_token_ids", "integers")),
    "ids that are text": ([{"prompt_token_ids": "abc"}], {}, TypeError, ("prompts[0]", "prompt_token_ids", "integers")),
    "prompt as long as the model": ([[1] * 200], {}, ValueError, ("prompts[0]", "200 tokens", "max_model_len=200")),
    "more than the pool": (
        [[1] * 100],
        {"sampling_params": P(max_tokens=30)},
        ValueError,
        ("prompts[0]", "100 tokens", "max_tokens=30", "129 KV slots", "num_kv_blocks=8", "lower max_tokens"),
    ),
    "prompts of no kind": (5, {}, TypeError, ("prompts", "int", "text")),
    "nothing": (None, {}, TypeError, ("prompts", "NoneType", "text")),
    "one of no kind": (["a", None], {}, TypeError, ("prompts[1]", "prompt_token_ids", "integers")),
    "bytes": (b"Once", {}, TypeError, ("prompts[0]", "prompt_token_ids", "bytes", "decoded")),
    "several bytes": (["a", b"b"], {}, TypeError, ("prompts[1]", "prompt_token_ids", "bytes", "decoded")),
    "half a surrogate pair": (["a", "b\ud800"], {}, ValueError, ("prompts[1]", "prompt", "surrogate", "b\\ud800")),
    "a tensor of fractions": (torch.ones(3), {}, TypeError, ("prompts[0]", "prompt_token_ids", "integers")),
    "a single number": (torch.tensor(3), {}, TypeError, ("prompts", "Tensor", "token ids")),
    "what only another model takes": (
        [{"input_ids": [1], "pixel_values": 0}],
        {},
        TypeError,
        ("prompts[0]", "pixel_values"),
    ),
    "empty dict": ([{}], {}, ValueError, ("prompts[0]", "'prompt' or 'prompt_token_ids'", "[]")),
    "misspelt key": ([{"prompt": "a", "cache_slat": "b"}], {}, TypeError, ("prompts[0]", "cache_slat", "cache_salt")),
    "text that is none": ([{"prompt": 5}], {}, TypeError, ("prompts[0]", "prompt", "string", "5")),
    "salt that is none": ([{"prompt": "a", "cache_salt": 5}], {}, TypeError, ("cache_salt", "string", "5")),
    "too few parameters": (["a", "b"], {"sampling_params": [ONE]}, ValueError, ("sampling_params has 1", "2 prompts")),
    "no parameters": (["a"], {"sampling_params": []}, ValueError, ("sampling_params has 0", "1 prompts", "each")),
    "parameters of no kind": (
        "a",
        {"sampling_params": {"n": 1}},
        TypeError,
        ("sampling_params", "SamplingParams", "n"),
    ),
    "one of them of no kind": (["a", "b"], {"sampling_params": [ONE, None]}, TypeError, ("sampling_params", "None")),
    "too many priorities": (["a"], {"priority": [1, 2]}, ValueError, ("priority has 2", "1 prompts")),
    "priority of no kind": (["a"], {"priority": ["high"]}, TypeError, ("priority", "int", "high")),
    "stop id outside": ("a", {"sampling_params": P(stop_token_ids=[5000])}, ValueError, ("stop_token_ids", "5000")),
    "more logprobs than tokens": ("a", {"sampling_params": P(logprobs=5000)}, ValueError, ("logprobs=5000", "lower")),
    "more prompt_logprobs than tokens": (
        "a",
        {"sampling_params": P(prompt_logprobs=5000)},
        ValueError,
        ("prompt_logprobs=5000", "lower"),
    ),
    "an argument that does not exist": ("a", {"best_of": 3}, TypeError, ("best_of",)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_leaves_nothing(name: str, llm: LLM, events: list[dict[str, Any]]) -> None:
    prompts, more, error, parts = BAD[name]
    cached = len(llm.engine.scheduler.blocks.block_by_digest)
    del events[:]
    with pytest.raises(error) as caught:
        llm.generate(prompts, **{"use_tqdm": False} | more)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
    assert {event["type"] for event in events} <= {"added", "finished"}  # nothing ran
    check_idle(llm)
    assert len(llm.engine.scheduler.blocks.block_by_digest) == cached


def test_encode_takes_no_text(llm: LLM) -> None:
    text: Any = "Hello"
    with pytest.raises(TypeError, match="must be a dict with the key 'prompt' or 'prompt_token_ids'; got 'Hello'"):
        llm.encode(text)


def test_a_refusal_leaves_requests_alone_that_were_there_before(llm: LLM) -> None:
    expected = tokens(llm)
    llm.engine.add_request("before", PROMPT, GREEDY)
    llm.engine.step()
    with pytest.raises(ValueError, match=r"prompts\[1\]"):
        llm.generate([PROMPT, []], GREEDY, use_tqdm=False)
    found = []
    while llm.engine.has_unfinished():
        found = [output.outputs[0].token_ids for output in llm.engine.step()]
    assert found == expected
    check_idle(llm)


def test_bad_conversations(llm: LLM, tmp_path: Path) -> None:
    with LLM(STORY_MODEL.parent / "story_draft", **SMALL) as plain, pytest.raises(ValueError, match="no chat template"):
        plain.chat([{"role": "user", "content": "Hello"}])
    no_dicts = "messages must be dicts with 'role' and 'content'"
    wrong: list[tuple[Any, str]] = [(["hello"], no_dicts), ([[]], no_dicts), ("hello", no_dicts)]
    for messages, error in [*wrong, ([{"role": "user"}], r"messages\[0\] must have 'role' and 'content'")]:
        with pytest.raises(ValueError, match=error):
            llm.chat(messages)
    hello = [{"role": "user", "content": "Hello"}]
    with pytest.raises(ValueError, match=r"^conversations\[1\]: messages\[0\] must have 'role' and 'content'"):
        llm.chat([hello, [{"role": "user"}]])
    for name in "tools", "tokenize", "not a name", 5:
        with pytest.raises(ValueError, match=f"^{name!r} is not a variable of a chat template that may be set"):
            llm.chat(hello, chat_template_kwargs={name: 1})
    with pytest.raises(TypeError, match="chat_template_kwargs must be a dict or None; got 'x'"):
        llm.chat(hello, chat_template_kwargs="x")
    for of_no_kind in None, 5, [5], [None]:
        with pytest.raises(TypeError, match="messages must be a list of dicts"):
            llm.chat(of_no_kind)
    path = Path(shutil.copytree(STORY_MODEL, tmp_path / "model"))
    template = (
        "{{ raise_exception('only users may speak') if messages[0]['role'] != 'user' }}{{ 'a' + messages[0].content }}"
    )
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with LLM(path, **SMALL) as picky:
        with pytest.raises(ValueError, match="only users may speak"):
            picky.chat([{"role": "system", "content": "Hello"}])
        with pytest.raises(ValueError, match="refuses the messages"):
            picky.chat([{"role": "user", "content": 5}])
        assert len(picky.chat([{"role": "user", "content": "Hello"}], GREEDY, use_tqdm=False)) == 1


@pytest.mark.parametrize(
    ("config", "error", "parts"),
    [
        ({"max_seqs": 4}, TypeError, ("LLM has no argument 'max_seqs'", "did you mean 'max_num_seqs'?")),
        ({"block_size": 16}, TypeError, ("LLM has no argument 'block_size'", "did you mean 'kvcache_block_size'?")),
        ({"swap_space": 4}, TypeError, ("LLM has no argument 'swap_space'", "it takes model, ", "on_event", "dtype")),
        ({"device": "gpu"}, ValueError, ("device", "'gpu'", "cpu, cuda")),
        ({"device": "cuda:99"}, ValueError, ("device", "'cuda:99'", "cpu, cuda")),
        ({"dtype": "int4"}, ValueError, ("dtype", "'int4'", "bfloat16")),
        ({"attention_backend": "magic"}, ValueError, ("attention_backend", "'magic'", "triton")),
        ({"max_model_len": 5000}, ValueError, ("max_model_len=5000", "2048", "lower it")),
        ({"kv_cache_gib": 1e-6}, ValueError, ("no room for a KV block of 16", "GiB are missing", "raise kv_cache_gib")),
        ({"model": ""}, ValueError, ("model=''", "not a checkpoint")),  # as from a variable that is not set
        ({"model": "no/such/directory"}, ValueError, ("model='no/such/directory'", "hub id such as")),
        ({"model": 5}, TypeError, ("model", "hub id", "got 5")),
        ({"speculative": {"model": 5}}, TypeError, ("speculative['model']", "hub id", "got 5")),
        ({"on_event": 5}, TypeError, ("on_event", "function", "got 5")),
        ({"num_kv_blocks": 10**12}, ValueError, ("num_kv_blocks=1000000000000", "this machine has", "lower")),
        ({"max_num_seqs": 10**9}, ValueError, ("max_num_seqs=1000000000", "this machine has", "lower")),
        ({"kv_cache_gib": 1e9}, ValueError, ("kv_cache_gib=1000000000.0", "this machine has", "lower")),
        ({"kvcache_block_size": 0}, ValueError, ("kvcache_block_size", "at least 1", "0")),
    ],
)
def test_bad_configurations(config: dict[str, Any], error: type[Exception], parts: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        LLM(**{"device": "cpu"} | config)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_where_there_is_none() -> None:
    with pytest.raises(ValueError, match=r"device='cuda'.*device='cpu'"):
        LLM(device="cuda")
    with pytest.raises(ValueError, match=r"attention_backend='triton' cannot be used.*torch_ref"):
        LLM(attention_backend="triton")


def test_a_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_model(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr("nanovllm.workers.executor.load_model", load_model)
    with pytest.raises(ValueError, match=r"cpu has too little free memory for .*20\.00 GiB.*take a smaller model"):
        LLM(device="cpu")


def test_a_model_without_its_tokenizer(tiny: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json.*skip_tokenizer_init"):
        LLM(tiny)


def test_defaults_are_not_shared_between_calls(llm: LLM) -> None:
    """vLLM changes the parameters that it is given; here one object may serve any number of calls."""
    before = repr(GREEDY)
    assert tokens(llm) == tokens(llm)
    assert repr(GREEDY) == before and EngineConfig() == EngineConfig()


# --- interruptions ---------------------------------------------------------------------------------------------------

INTERRUPTED = [[i, *range(1, 12)] for i in range(6)]
TIGHT = SMALL | {"kvcache_block_size": 4, "num_kv_blocks": 15, "max_num_seqs": 4, "max_num_batched_tokens": 32}
PARAMS = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (7, 3, 7, 7, 2, 5)]


@pytest.fixture(scope="module")
def undisturbed(tiny: Path) -> list[list[int]]:
    """What each of the interrupted requests gets alone."""
    with LLM(tiny, **SMALL, skip_tokenizer_init=True) as llm:
        pairs = zip(INTERRUPTED, PARAMS, strict=True)
        return [llm.generate(p, s, use_tqdm=False)[0].outputs[0].token_ids for p, s in pairs]


def interrupt(at: str, error: Callable[[], object]) -> tuple[Callable[[dict[str, Any]], None], list[str]]:
    """A listener that calls `error` when the second event of type `at` comes, once; and the log of what it heard."""
    heard: list[str] = []

    def listen(event: dict[str, Any]) -> None:
        heard.append(event["type"])
        if event["type"] == at and heard.count(at) == 2:
            error()

    return listen, heard


def control_c() -> None:
    signal.raise_signal(signal.SIGINT)


def failure() -> None:
    raise ValueError("planted")  # must not be taken for a refusal of the request


@BOTH
@pytest.mark.parametrize("at", ["added", "admitted", "scheduled", "token", "blocks", "finished", "preempted"])
@pytest.mark.parametrize(("error", "kind"), [(control_c, KeyboardInterrupt), (failure, RuntimeError)])
def test_after_an_interruption_all_is_free_and_the_llm_works(
    tiny: Path,
    undisturbed: list[list[int]],
    at: str,
    error: Callable[[], object],
    kind: type[BaseException],
    asynchronous: bool,
) -> None:
    listen, heard = interrupt(at, error)
    with LLM(tiny, **TIGHT, async_scheduling=asynchronous, skip_tokenizer_init=True, on_event=listen) as llm:
        with pytest.raises(kind):
            llm.generate(INTERRUPTED, PARAMS, use_tqdm=False)
        assert heard.count(at) >= 2  # it did get there
        check_idle(llm)
        again = llm.generate(INTERRUPTED, PARAMS, use_tqdm=False)
        check_idle(llm)
    assert [output.outputs[0].token_ids for output in again] == undisturbed


def test_control_c_between_data_plane_and_scheduler(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that only one of them knows is not left behind."""
    with LLM(tiny, **SMALL, skip_tokenizer_init=True) as llm:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(llm.engine.scheduler, "add", lambda seq: control_c())
            llm.generate(INTERRUPTED, PARAMS, use_tqdm=False)
        check_idle(llm)
        assert len(tokens(llm)[0]) == 6


@BOTH
@pytest.mark.parametrize("delay", [0.003, 0.02, 0.06])
def test_control_c_at_any_moment(tiny: Path, delay: float, asynchronous: bool) -> None:
    """The real signal, out of another thread, wherever Python happens to be."""
    with LLM(tiny, **SMALL, async_scheduling=asynchronous, skip_tokenizer_init=True) as llm:
        expected = tokens(llm)
        long = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
        timer = threading.Timer(delay, signal.raise_signal, [signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            llm.generate([[i, *range(30)] for i in range(20)], long, use_tqdm=False)
        timer.join()
        check_idle(llm)
        assert tokens(llm) == expected
        check_idle(llm)


def test_a_closed_llm_gave_everything_back(tiny: Path) -> None:
    with suppress(RuntimeError), LLM(tiny, **SMALL, skip_tokenizer_init=True) as llm:
        runner: Any = llm.engine.executor.runner
        memory = [
            weakref.ref(t) for t in (*runner.target.model.parameters(), *runner.target.kv_cache, runner.rows.token_ids)
        ]
        llm.engine.add_request("0", PROMPT, GREEDY)
        llm.engine.step()
        raise RuntimeError("in the middle")
    check_idle(llm)
    llm.close()  # twice is fine
    gc.collect()
    assert not any(tensor() is not None for tensor in memory), "also while somebody keeps the LLM"
    assert runner.closed
    with pytest.raises(RuntimeError, match="this engine is closed"):
        llm.generate([PROMPT], GREEDY, use_tqdm=False)


def test_any_kind_of_value_error_says_which_prompt_it_was_about(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some cannot be made of a text: those of `json` and of text codecs."""
    answers = iter([[5], None])
    monkeypatch.setattr(llm, "encode", lambda prompt: next(answers) or json.loads("{"))
    with pytest.raises(ValueError, match=r"^prompts\[1\]: Expecting"):
        llm.generate([PROMPT, PROMPT], GREEDY, use_tqdm=False)
    monkeypatch.undo()
    check_idle(llm)
