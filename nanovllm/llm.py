"""The offline API: prompts in, finished outputs out. The same calls as vLLM's `LLM`, for what is supported."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tqdm import tqdm

from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.one_at_a_time import Calls, one_at_a_time
from nanovllm.engine.trace import OnEvent
from nanovllm.layers.rope import DynamicScaling
from nanovllm.misuse import Home, check_names, check_threads
from nanovllm.models.checkpoint import find_checkpoint, generation_file, read_eos_token_ids, read_sampling_defaults
from nanovllm.models.config import ModelConfig, read_config
from nanovllm.models.sharding import shard_config, with_expert_parallel
from nanovllm.outputs import RequestOutput
from nanovllm.runner.draft import read_draft_config
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.text.bad_words import with_spellings
from nanovllm.text.chat import Message, Tool
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.grammars import TokenGrammars
from nanovllm.text.prompts import encode_prompt
from nanovllm.text.token_ids import as_lists, is_token_id, prompts_of
from nanovllm.text.token_texts import TokenTexts
from nanovllm.text.tokenizer import Tokenizer, tokenizer_eos
from nanovllm.workers import find_device, start_executor
from nanovllm.workers.executor import RunnerSpec

logger = logging.getLogger(__name__)

# A text; {"prompt": text} or {"prompt_token_ids": ids}, both with an optional "cache_salt"; or just the ids: a list, an
# array or a tensor; or what `apply_chat_template` of transformers returns.
Prompt: TypeAlias = str | Mapping[str, Any] | Sequence[int]
EMBEDDED_MODEL = Path(__file__).parent.parent / "assets" / "story_model"


class LLM:
    """A model, ready to generate.

        llm = LLM("Qwen/Qwen3-0.6B")
        for output in llm.generate(["Once upon a time"], SamplingParams(temperature=0.8)):
            print(output.outputs[0].text)

    model: a directory or a hub id; None is the story model that comes with the project.
    skip_tokenizer_init: no text anywhere; prompts are token ids. The tokenizer's EOS counts all the same.
    on_event: called with a dict for everything that happens to a request (see `engine/trace.py`).
    config: the fields of `EngineConfig`. Raises TypeError for one that does not exist, and ValueError for everything
        else that is wrong with model, configuration or device.

    Any thread may call. `generate`, `chat` and `close` wait for each other, so that threads get their turns and not one
    batch: `AsyncLLM` runs what many threads ask together. A call from inside a call, by `on_event` or a progress bar,
    raises RuntimeError. So does a call in a process that was forked after the LLM was made.

    From then on Python collects garbage less often in this process (see `workers/executor.py`). If PyTorch came with
    the import of `LLM`, garbage among what was there by then is never collected, unless `gc.unfreeze()` is called (see
    `startup.py`).
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        skip_tokenizer_init: bool = False,
        on_event: OnEvent | None = None,
        **config: Any,
    ) -> None:
        check_names(config)
        chosen = EngineConfig(**config)
        if on_event is not None and not callable(on_event):
            raise TypeError(f"on_event must be a function that takes a dict, or None; got {on_event!r}")
        device = find_device(chosen.device)
        check_threads(device)
        self.path = find_checkpoint(EMBEDDED_MODEL if model is None else model, weights=chosen.load_format != "dummy")
        model_config = read_config(self.path)
        resolved = resolve(chosen, model_config, device)
        self.sampling_defaults = read_defaults(self.path, resolved)  # where a request says nothing
        eos_token_ids = read_eos_token_ids(self.path)
        # With random weights and no text, the tokenizer's EOS is not worth the time that reading it takes.
        if not skip_tokenizer_init or chosen.load_format != "dummy":
            eos_token_ids |= find_tokenizer_eos(self.path, needed=not skip_tokenizer_init)
        spec = RunnerSpec(str(self.path), resolved, eos_token_ids, with_masks=not skip_tokenizer_init)
        self.tokenizer: Tokenizer | None = None
        with ThreadPoolExecutor(1, "nanovllm-tokenizer") as pool:
            reading = None if skip_tokenizer_init else pool.submit(Tokenizer, self.path)  # beside the weights
            executor = start_executor(spec, device)
            try:
                if reading is not None:
                    self.tokenizer = reading.result()
            except BaseException:
                executor.close()
                raise
        self.attention_backend = executor.runner.backend.name
        self.config = replace(resolved, num_kv_blocks=executor.runner.num_kv_blocks)

        self.engine = LLMEngine(
            executor,
            self.config,
            vocab_size=model_config.vocab_size,
            eos_token_ids=eos_token_ids,
            make_detokenizer=None if self.tokenizer is None else partial(Detokenizer, TokenTexts(self.tokenizer)),
            grammars=None
            if self.tokenizer is None
            else TokenGrammars(self.tokenizer, model_config.vocab_size, eos_token_ids),
            on_event=on_event,
            window=executor.runner.window,
        )
        self._ids = count()
        self.calls = Calls()
        self._home = Home()

    @one_at_a_time(wait=True)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs are in the order of the prompts.

        sampling_params: one for all, or one for each prompt; None: the checkpoint's defaults.
        priority: one number for each prompt; the smaller goes first.
        use_tqdm: whether to show a progress bar; or what makes one, called like `tqdm`.

        Raises ValueError (TypeError for what is of the wrong kind) for a prompt or parameters that make no sense or
        could never fit. Nothing has run then.
        """
        self._home.check()
        batch = as_list(prompts)
        default = SamplingParams(**self.sampling_defaults) if sampling_params is None else sampling_params
        params = spread("sampling_params", default, len(batch), SamplingParams)
        priorities = spread("priority", 0 if priority is None else priority, len(batch), int)
        ids = [str(next(self._ids)) for _ in batch]
        try:
            for i, (request_id, prompt, p, order) in enumerate(zip(ids, batch, params, priorities, strict=True)):
                try:
                    token_ids = self.encode(prompt)
                    final = self.prepare(p).changed(output_kind=RequestOutputKind.FINAL_ONLY)
                    salt, text = prompt.get("cache_salt"), prompt.get("prompt")
                    self.engine.add_request(request_id, token_ids, final, order, salt, prompt=text)
                except (ValueError, TypeError) as error:
                    kind = TypeError if isinstance(error, TypeError) else ValueError  # not all are made of a text
                    raise kind(f"prompts[{i}]: {error}") from None
            finished = self._run(len(batch), use_tqdm)
        except BaseException as error:
            if not isinstance(error, ValueError | TypeError):  # no refusal, but an interruption
                self.engine.abort_all()
            for request_id in ids:  # those that were fine
                self.engine.abort_request(request_id)
            raise
        return [finished[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, in the model's own chat format.

        add_generation_prompt: whether the prompt ends with the beginning of an answer, where the format has one.
        continue_final_message: whether the answer continues the last message; then add_generation_prompt must be False.
        tools: functions that the model may call, as JSON schemas. See `ChatTemplate.render`.
        chat_template_kwargs: variables for the chat template, such as {"enable_thinking": False}.

        Raises ValueError for malformed messages, and for what the model's template refuses or would leave out.
        """
        if self.tokenizer is None:
            raise ValueError("chat needs the tokenizer; leave skip_tokenizer_init out")
        prompts = self.tokenizer.encode_chats(
            messages, add_generation_prompt, tools, chat_template_kwargs, continue_final_message
        )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def encode(self, prompt: Mapping[str, Any]) -> Sequence[int]:
        """The token ids of a prompt, which `LLMEngine.add_request` checks. Raises TypeError for what is no prompt, and
        ValueError for a text that cannot be encoded."""
        return encode_prompt(prompt, self.tokenizer)

    def prepare(self, params: SamplingParams) -> SamplingParams:
        """The parameters as the engine wants them: with token ids for their texts. Any thread may call this. Raises
        ValueError for texts that cannot be turned into token ids."""
        return with_spellings(params, self.tokenizer)

    def _run(self, total: int, use_tqdm: bool | Callable[..., Any]) -> dict[str, RequestOutput]:
        """Step until all is done. An interruption (Ctrl-C, too) ends every request, and the next call works."""
        finished: dict[str, RequestOutput] = {}
        num_tokens, start = 0, time.perf_counter()
        make_bar = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
        try:
            with make_bar(total=total, desc="requests", dynamic_ncols=True) as bar:
                while self.engine.has_unfinished():
                    for output in self.engine.step():
                        finished[output.request_id] = output
                        num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
                        bar.set_postfix_str(f"{num_tokens / (time.perf_counter() - start):.0f} output tokens/s", False)
                        bar.update()
        except BaseException:
            self.engine.abort_all()
            raise
        return finished

    @one_at_a_time(wait=True)
    def close(self) -> None:
        """Give all memory back. Nothing can be generated afterwards. A call that another thread is in ends first."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def resolve(config: EngineConfig, model: ModelConfig, device: torch.device) -> EngineConfig:
    """Fill in the defaults that depend on model and device. Raises ValueError for what does not fit them."""
    shard_config(with_expert_parallel(model) if config.enable_expert_parallel else model, config.tensor_parallel_size)
    max_len, speculation = model.max_position_embeddings, config.speculation
    if isinstance(model.rope_scaling, DynamicScaling) and (config.max_model_len or 0) > max_len:
        raise ValueError(
            f"max_model_len={config.max_model_len}: RoPE scaling 'dynamic' is supported up to max_position_embeddings="
            f"{max_len}, since beyond it keys that are cached would have to change; lower it"
        )
    if speculation is not None and speculation.method == "draft":
        max_len = min(max_len, read_draft_config(speculation, model).max_position_embeddings)
    return config.resolve(on_gpu=device.type == "cuda", model_max_len=max_len)


def find_tokenizer_eos(path: Path, needed: bool) -> set[int]:
    """The tokenizer's EOS id. Where token ids will do, that of a tokenizer that cannot be read is not known."""
    try:
        eos = tokenizer_eos(path) if needed or (path / "tokenizer.json").is_file() else None
    except ValueError as error:
        if needed:
            raise
        logger.warning("the EOS token of the tokenizer is not known: %s", error)
        eos = None
    return set() if eos is None else {eos}


def read_defaults(path: Path, config: EngineConfig) -> dict[str, Any]:
    """Sampling parameters for what a request leaves open. Raises ValueError for values that make no sense."""
    defaults = read_sampling_defaults(path) if config.generation_config == "auto" else {}
    try:
        SamplingParams(**defaults)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{generation_file(path)}: {error}; mend it, or pass generation_config='vllm'") from error
    return defaults


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Mapping[str, Any]]:
    """One prompt or many, as dicts. Numbers side by side are one prompt, given by its token ids; an array or a tensor
    with two dimensions is a prompt per row."""
    many: Any = as_lists(prompts)
    if not isinstance(many, str | Mapping | Sequence):
        raise TypeError(f"prompts must be a text, a dict, token ids or a list of these; got {type(prompts).__name__}")
    if isinstance(many, str | Mapping) or (many and is_token_id(many[0])):
        many = [many]
    found: list[Mapping[str, Any]] = []
    for prompt in many:
        if isinstance(prompt, Mapping):
            found += prompts_of(prompt) if "input_ids" in prompt else [prompt]
        elif getattr(prompt, "ndim", 1) == 2:
            found += [{"prompt_token_ids": row} for row in prompt.tolist()]
        else:
            found.append({"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt})
    return found


def spread(name: str, value: Any, n: int, kind: type) -> list[Any]:
    """One value for all of n prompts, or a list with one for each."""
    values = [value] * n if isinstance(value, kind) else value
    if not isinstance(values, Sequence) or not all(isinstance(v, kind) for v in values):
        raise TypeError(f"{name} must be one {kind.__name__} or a list of them; got {value!r}")
    if len(values) != n:
        raise ValueError(f"{name} has {len(values)} entries for {n} prompts; give one for all, or one for each")
    return list(values)
