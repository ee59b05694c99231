"""`LLM` as vLLM's twin. What is expected follows vLLM 0.25.1, from its sources: `vllm/entrypoints/llm.py` (signatures),
`vllm/outputs.py`, `vllm/logprobs.py`, `vllm/sampling_params.py` (names and defaults), `vllm/v1/engine/detokenizer.py`
and `vllm/v1/core/sched/utils.py` (what ends an output, and what is shown of it)."""

import gc
import inspect
import json
import shutil
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from nanovllm import LLM, CompletionOutput, RequestOutput, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.outputs import Logprob
from tests.data import same_script

STORY_MODEL = Path(__file__).parents[2] / "assets" / "story_model"
DATA = Path(__file__).parents[1] / "data"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% if mood is defined %}({{ mood }}) {% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=4)

# Parameters of vLLM 0.25.1 that a script may give by name (those for images, LoRA and the like left out), in order.
VLLM_CALLS = {
    "generate": ("prompts", "sampling_params", "*", "use_tqdm", "priority"),
    "chat": (
        "messages", "sampling_params", "use_tqdm", "*",
        "add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs",
    ),
}  # fmt: skip
VLLM_SAMPLING_DEFAULTS: dict[str, Any] = {
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "ignore_eos": False, "max_tokens": 16, "min_tokens": 0,
    "logprobs": None, "skip_special_tokens": True, "include_stop_str_in_output": False,
    "logit_bias": None, "allowed_token_ids": None, "prompt_logprobs": None, "structured_outputs": None,
}  # fmt: skip
VLLM_FIELDS = {
    Logprob: ("logprob", "rank", "decoded_token"),
    CompletionOutput: (
        "index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason",
    ),
    RequestOutput: ("request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "outputs", "finished", "metrics"),
}  # fmt: skip


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The story model with a chat template. It was not taught to chat, but it will answer anything with a story."""
    path = Path(shutil.copytree(STORY_MODEL, tmp_path_factory.mktemp("talking") / "model"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": CHAT_TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def llm(talking: Path) -> Iterator[LLM]:
    with LLM(talking, max_model_len=256, kv_cache_gib=0.02) as llm:
        yield llm


def test_dtypes_have_short_names_as_well() -> None:
    known = {"half": "float16", "float": "float32", "bfloat16": "bfloat16"}
    assert {name: EngineConfig(dtype=name).dtype for name in known} == known


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((700, 10, 10), (20_000, 10, 10)),
        ((0, 10, 10), (0, 10, 10)),
        ((30_000, 5, 5), (30_000, 10, 10)),
        ((700, 1000, 1000), (20_000, 1000, 1000)),
    ],
    ids=["default", "off", "young ones rarer", "full ones rarer"],
)
def test_garbage_is_collected_less_often_but_never_more_often(
    before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    kept = gc.get_threshold()
    try:
        gc.set_threshold(*before)
        with LLM(max_model_len=64, kv_cache_gib=0.01):
            assert gc.get_threshold() == after
    finally:
        gc.set_threshold(*kept)


def test_steps_of_a_large_batch_collect_no_garbage(llm: LLM) -> None:
    collected: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collected.append(info["generation"])

    prompts = [[i % 500, 1, 2, 3] for i in range(256)]
    llm.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    gc.collect()
    gc.callbacks.append(note)
    try:
        llm.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    finally:
        gc.callbacks.remove(note)
    assert collected == []


def approximately(expected: Any) -> Any:
    """The same with tolerance in every number that is not a whole one."""
    if isinstance(expected, dict):
        return {key: approximately(value) for key, value in expected.items()}
    if isinstance(expected, list):
        return [approximately(value) for value in expected]
    return pytest.approx(expected, abs=2e-4) if isinstance(expected, float) else expected


def test_the_same_script_runs_on_both(talking: Path) -> None:
    found = json.loads(json.dumps(same_script.run(str(talking))))  # as the script prints it: keys are texts
    expected = json.loads((DATA / "same_script.json").read_text(encoding="utf-8"))
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == approximately(expected[name]), name


def test_the_script_names_this_engine_in_one_line_of_code() -> None:
    code = (DATA / "same_script.py").read_text(encoding="utf-8").split('"""', 2)[2]
    assert [line for line in code.splitlines() if "nanovllm" in line] == ["from nanovllm import LLM, SamplingParams"]


@pytest.mark.parametrize("name", VLLM_CALLS)
def test_calls_take_what_vllm_takes_in_its_order(name: str) -> None:
    parameters = list(inspect.signature(getattr(LLM, name)).parameters.values())[1:]
    names = [p.name for p in parameters]
    if any(p.kind is p.KEYWORD_ONLY for p in parameters):
        names.insert(sum(p.kind is not p.KEYWORD_ONLY for p in parameters), "*")
    assert tuple(names) == VLLM_CALLS[name]


def test_sampling_parameters_have_vllms_names_and_defaults() -> None:
    ours = {f.name: f.default for f in fields(SamplingParams) if f.init}
    assert ours.pop("max_tokens") == 64  # 16 in vLLM, where everybody stumbles over it
    for name in ("stop", "stop_token_ids", "bad_words"):
        assert ours.pop(name) == ()  # None or a list in vLLM; None is accepted
    assert ours.pop("output_kind").value == 0
    assert ours == {name: value for name, value in VLLM_SAMPLING_DEFAULTS.items() if name != "max_tokens"}


@pytest.mark.parametrize("kind", VLLM_FIELDS)
def test_outputs_have_vllms_names(kind: type) -> None:
    assert tuple(f.name for f in fields(kind)) == VLLM_FIELDS[kind]
    assert isinstance(getattr(RequestOutput, "num_cached_tokens", None), property)


def test_outputs_are_in_the_order_of_the_prompts_whatever_ends_first(llm: LLM) -> None:
    lengths = [5, 1, 3]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(["Nell the fox", "Once upon", "In the whole"], params, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["Nell the fox", "Once upon", "In the whole"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    ids = [int(output.request_id) for output in outputs]
    assert ids == sorted(ids)


def test_one_prompt_may_be_many_things(llm: LLM) -> None:
    text = "Nell the fox"
    ids = llm.generate(text, GREEDY, use_tqdm=False)[0].prompt_token_ids
    as_many = [text, [text], {"prompt": text}, ids, tuple(ids), [ids], {"prompt_token_ids": ids}]
    as_many += [{"prompt_token_ids": ids, "prompt": "another", "cache_salt": None}, (text,)]
    outputs = [llm.generate(prompts, GREEDY, use_tqdm=False) for prompts in as_many]
    assert {len(output) for output in outputs} == {1}
    assert {tuple(output[0].outputs[0].token_ids) for output in outputs} == {tuple(outputs[0][0].outputs[0].token_ids)}
    assert [o[0].prompt for o in outputs] == [text, text, text, None, None, None, None, "another", text]


def test_generate_without_parameters_takes_the_defaults(llm: LLM) -> None:
    assert len(llm.generate("Nell", use_tqdm=False)[0].outputs[0].token_ids) <= SamplingParams().max_tokens  # type: ignore[operator]


def test_n_choices_are_different_repeatable_and_led_by_the_one_alone(llm: LLM) -> None:
    params: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 6, "ignore_eos": True}
    runs = [llm.generate("Nell the fox", SamplingParams(n=n, **params), use_tqdm=False)[0] for n in (3, 3, 1)]
    texts = [[choice.text for choice in run.outputs] for run in runs]
    assert len(set(texts[0])) == 3 and texts[0] == texts[1] and texts[2] == texts[0][:1]
    assert [choice.index for choice in runs[0].outputs] == [0, 1, 2]


def test_logprobs_say_how_likely_a_token_was_and_what_it_says(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=1, max_tokens=5, ignore_eos=True, logprobs=3)
    choice = llm.generate("Nell the fox", params, use_tqdm=False)[0].outputs[0]
    assert choice.logprobs is not None and len(choice.logprobs) == 5
    total = 0.0
    for token, position in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(position)) == token and 3 <= len(position) <= 4
        assert {found.rank for found in position.values()} >= {1, 2, 3}
        by_rank = sorted(position.values(), key=lambda found: found.rank or 0)
        assert [found.logprob for found in by_rank] == sorted((f.logprob for f in by_rank), reverse=True)
        total += position[token].logprob
    assert choice.cumulative_logprob == pytest.approx(total)
    assert (
        "".join(str(p[t].decoded_token) for p, t in zip(choice.logprobs, choice.token_ids, strict=True)) == choice.text
    )


def test_the_text_of_a_special_token_is_shown_with_its_logprob(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=0)
    choice = llm.generate("And so the story ends.", params, use_tqdm=False)[0].outputs[0]
    assert choice.finish_reason == "stop" and choice.logprobs is not None
    assert [f.decoded_token for f in choice.logprobs[-1].values()] == ["<|endoftext|>"]
    assert "<|endoftext|>" not in choice.text


def test_a_special_token_may_be_a_stop_string_and_is_not_shown(llm: LLM) -> None:
    """CASES D5, with what would end the text anyway: as HF's `stop_strings`."""
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "stop": ["zz", "<|endoftext|>"]}
    expected = llm.generate("And so the story ends.", SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    for more in {}, {"include_stop_str_in_output": True}, {"stop": ["<|endoftext|>"], "max_tokens": None}:
        (found,) = llm.generate("And so the story ends.", SamplingParams(**params | more), use_tqdm=False)[0].outputs
        assert (found.text, found.token_ids) == (expected[0].outputs[0].text, expected[0].outputs[0].token_ids)
        assert (found.finish_reason, found.stop_reason) == ("stop", "<|endoftext|>")
    shown = llm.generate("And so the story ends.", SamplingParams(**params, skip_special_tokens=False), use_tqdm=False)[
        0
    ].outputs[0]
    assert (shown.text, shown.stop_reason) == (expected[0].outputs[0].text, "<|endoftext|>")


def test_without_a_tokenizer_there_are_ids_and_logprobs_but_no_text(talking: Path) -> None:
    with LLM(talking, skip_tokenizer_init=True, kv_cache_gib=0.02) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, logprobs=1)
        choice = llm.generate([[46, 381]], params, use_tqdm=False)[0].outputs[0]
        assert choice.text == "" and len(choice.token_ids) == 2 and choice.logprobs is not None
        assert {found.decoded_token for position in choice.logprobs for found in position.values()} == {None}
        for call in (llm.generate, llm.chat):
            with pytest.raises(ValueError, match="skip_tokenizer_init"):
                call("text")


def test_priority_decides_who_goes_first(talking: Path) -> None:
    events: list[dict[str, Any]] = []
    with LLM(talking, max_num_seqs=1, kv_cache_gib=0.02, on_event=events.append) as llm:
        llm.generate(["Nell", "Once", "In"], SamplingParams(max_tokens=1), use_tqdm=False, priority=[2, 0, 1])
    assert [event["request"] for event in events if event["type"] == "finished"] == ["1", "2", "0"]


def test_metrics_tell_waiting_time_first_token_and_what_was_cached(talking: Path) -> None:
    prompt = list(range(100, 140))
    with LLM(talking, max_num_seqs=1, kv_cache_gib=0.02, kvcache_block_size=16) as llm:
        first, second = llm.generate([prompt, prompt], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert [first.num_cached_tokens, second.num_cached_tokens] == [0, 32]
    for output in (first, second):
        m = output.metrics
        assert m.time_in_queue is not None and m.time_to_first_token is not None and m.num_preemptions == 0
        assert m.first_token_time is not None and m.finished_time is not None
        assert 0 <= m.time_in_queue < m.time_to_first_token < m.finished_time - m.arrival_time
    waited, taken = second.metrics.time_in_queue, first.metrics.finished_time
    assert waited is not None and taken is not None
    assert waited >= taken - second.metrics.arrival_time  # one seat: it waits for the first to end


def test_the_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    for use_tqdm, shown in ((False, ""), (True, "2/2"), (partial(tqdm, leave=True, unit="story"), "2/2")):
        for call in (llm.generate, llm.chat):
            prompts: Any = ["a", "b"] if call == llm.generate else [[{"role": "user", "content": "a"}]] * 2
            call(prompts, GREEDY, use_tqdm=use_tqdm)
            printed = capsys.readouterr()
            assert printed.out == ""
            assert shown in printed.err and ("output tokens/s" in printed.err) == bool(shown)


def test_chat_answers_one_conversation_or_several(llm: LLM) -> None:
    one = [{"role": "user", "content": "A story, please."}]
    two = [*one, {"role": "assistant", "content": "Once."}, {"role": "user", "content": "And?"}]
    alone = [llm.chat(conversation, GREEDY, use_tqdm=False)[0] for conversation in (one, two)]
    together = llm.chat([one, two], [GREEDY, GREEDY], use_tqdm=False)
    assert [o.outputs[0].text for o in alone] == [o.outputs[0].text for o in together]
    assert llm.tokenizer is not None
    text = "user: A story, please.\nassistant: Once.\nuser: And?\nassistant:"
    assert together[1].prompt_token_ids == llm.tokenizer.encode(text)
    assert llm.chat([], use_tqdm=False) == llm.generate([], use_tqdm=False) == []
    tools = [{"type": "function", "function": {"name": "find_kite"}}]
    [output] = llm.chat(one, GREEDY, use_tqdm=False, tools=tools)
    text = f"user: A story, please.\n{json.dumps(tools[0])}\nassistant:"
    assert output.prompt_token_ids == llm.tokenizer.encode(text)
    [output] = llm.chat(one, GREEDY, use_tqdm=False, chat_template_kwargs={"mood": "sad"})
    assert output.prompt_token_ids == llm.tokenizer.encode("user: A story, please.\n(sad) assistant:")
    [output] = llm.chat(two[:2], GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt_token_ids == llm.tokenizer.encode("user: A story, please.\nassistant: Once.")
    with pytest.raises(ValueError, match="add_generation_prompt=False"):
        llm.chat(two[:2], continue_final_message=True)
