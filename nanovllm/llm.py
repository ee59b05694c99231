"""The offline API: prompts in, finished outputs out. The same calls as vLLM's `LLM`, for what is supported."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import torch
from tqdm import tqdm

from nanovllm.config import EngineConfig
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.trace import OnEvent
from nanovllm.models.checkpoint import find_checkpoint
from nanovllm.models.config import DTYPES, read_config
from nanovllm.models.loader import load_model
from nanovllm.outputs import RequestOutput
from nanovllm.runner.executor import LocalExecutor
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.tokenizer import Message, Tokenizer

# A text; {"prompt": text} or {"prompt_token_ids": ids}, both with an optional "cache_salt"; or just the ids.
Prompt: TypeAlias = str | Mapping[str, Any] | Sequence[int]
EMBEDDED_MODEL = Path(__file__).parent.parent / "assets" / "story_model"


class LLM:
    """A model, ready to generate.

        llm = LLM("Qwen/Qwen3-0.6B")
        for output in llm.generate(["Once upon a time"], SamplingParams(temperature=0.8)):
            print(output.outputs[0].text)

    model: a directory or a hub id; None is the story model that comes with the project.
    skip_tokenizer_init: no text anywhere; prompts are token ids.
    on_event: called with a dict for everything that happens to a request (see `engine/trace.py`).
    config: the fields of `EngineConfig`. Raises TypeError for one that does not exist, and ValueError for everything
        else that is wrong with model, configuration or device.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        skip_tokenizer_init: bool = False,
        on_event: OnEvent | None = None,
        **config: Any,
    ) -> None:
        chosen = EngineConfig(**config)
        if chosen.tensor_parallel_size != 1:
            raise ValueError(f"tensor_parallel_size={chosen.tensor_parallel_size} is not supported yet; use 1")
        device = torch.device(chosen.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.path = path = find_checkpoint(model or EMBEDDED_MODEL, weights=chosen.load_format != "dummy")
        resolved = chosen.resolve(on_gpu=device.type == "cuda", model_max_len=read_config(path).max_position_embeddings)
        self.tokenizer = None if skip_tokenizer_init else Tokenizer(path)
        loaded = load_model(
            path,
            device=device,
            dtype=None if chosen.dtype == "auto" else DTYPES[chosen.dtype],
            max_model_len=resolved.max_model_len,
            load_format=chosen.load_format,
        )
        runner = ModelRunner(loaded, resolved, device)
        self.attention_backend = runner.backend.name
        self.config = replace(resolved, num_kv_blocks=runner.num_kv_blocks)
        self.engine = LLMEngine(
            LocalExecutor(runner),
            self.config,
            vocab_size=loaded.config.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            make_detokenizer=None if self.tokenizer is None else partial(Detokenizer, self.tokenizer),
            on_event=on_event,
        )
        self._ids = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs are in the order of the prompts.

        sampling_params: one for all, or one for each prompt. priority: one number for each; the smaller goes first.
        Raises ValueError, before anything runs, for a prompt or parameters that make no sense or could never fit.
        """
        batch = as_list(prompts)
        params = spread("sampling_params", sampling_params or SamplingParams(), len(batch))
        priorities = spread("priority", priority if priority is not None else 0, len(batch))
        ids = [str(next(self._ids)) for _ in batch]
        try:
            for i, (request_id, prompt, p, order) in enumerate(zip(ids, batch, params, priorities, strict=True)):
                with naming(f"prompts[{i}]"):
                    token_ids, salt = self._encode(prompt)
                    final = replace(p, output_kind=RequestOutputKind.FINAL_ONLY)
                    self.engine.add_request(request_id, token_ids, final, order, salt)
        except (ValueError, TypeError):
            for request_id in ids:  # those that were fine
                self.engine.abort_request(request_id)
            raise
        finished = self._run(len(batch), use_tqdm)
        for request_id, prompt in zip(ids, batch, strict=True):
            finished[request_id].prompt = text_of(prompt)
        return [finished[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, in the model's own chat format."""
        if self.tokenizer is None:
            raise ValueError("chat needs the tokenizer; leave skip_tokenizer_init out")
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        encoded = [{"prompt_token_ids": self.tokenizer.encode_chat(c)} for c in conversations]
        return self.generate(encoded, sampling_params, use_tqdm=use_tqdm)

    def _encode(self, prompt: Prompt) -> tuple[Sequence[int], str | None]:
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            return prompt["prompt_token_ids"], salt
        text = text_of(prompt)
        if text is None and isinstance(prompt, Mapping):
            raise ValueError(f"a prompt needs the key 'prompt' or 'prompt_token_ids'; got {sorted(prompt)}")
        if text is None:
            return prompt, salt  # type: ignore[return-value]  # token ids, which add_request checks
        if self.tokenizer is None:
            raise ValueError("a text prompt needs the tokenizer; pass token ids, or leave skip_tokenizer_init out")
        return self.tokenizer.encode(text), salt

    def _run(self, total: int, use_tqdm: bool) -> dict[str, RequestOutput]:
        """Step until all is done. An interruption (Ctrl-C, too) ends every request, and the next call works."""
        finished: dict[str, RequestOutput] = {}
        num_tokens, start = 0, time.perf_counter()
        with tqdm(total=total, desc="requests", disable=not use_tqdm, dynamic_ncols=True) as bar:
            try:
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

    def close(self) -> None:
        """Give all memory back. Nothing can be generated afterwards."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Say in an error which of many it was about."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(f"{what}: {error}") from None


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many? A list of numbers is one prompt, given by its token ids."""
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def text_of(prompt: Prompt) -> str | None:
    if isinstance(prompt, Mapping):
        return prompt.get("prompt")
    return prompt if isinstance(prompt, str) else None


def spread(name: str, value: Any, n: int) -> list[Any]:
    """One value for all of n prompts, or a list with one for each."""
    if isinstance(value, Iterable):
        values = list(value)
        if len(values) != n:
            raise ValueError(f"{name} has {len(values)} entries for {n} prompts; give one for all, or one for each")
        return values
    return [value] * n
