"""Hugging Face's `generate` as a contender: greedy, with or without its cache, alone or as a padded batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria
from transformers.utils import logging

from benchmarks.lib.recorder import CallRecorder
from benchmarks.lib.workloads import Request, Scenario

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.backends.cuda.enable_cudnn_sdp(False)  # as in the stages: it would plan anew for every length


class Clock(StoppingCriteria):
    """Never stops anything. It is asked after every token, and that is when it looks at the time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()  # `generate` waits for the step at this point in any case
        self.times.append(self.clock())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class HuggingFaceRunner:
    """`batch=False` serves one request after the other, `batch=True` static batches padded on the left.

    The model knows no EOS here, so that each row gets as many tokens as are asked for (`min_new_tokens` would do that
    too, but at the price of a logits processor in every step). A batch runs as long as its longest request; what the
    other rows get beyond their own length is dropped and not counted.
    """

    def __init__(self, model: str, device: str, *, batch: bool, use_cache: bool, limited: bool) -> None:
        # As the stages: the checkpoint's own dtype on a GPU, float32 on a CPU
        dtype = torch.float32 if torch.device(device).type == "cpu" else "auto"
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.model.to(device).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        self.device = device
        self.batch, self.use_cache, self.limited = batch, use_cache, limited
        self.num_rows = 1
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.vocab_size: int = self.model.config.vocab_size

    def prepare(self, scenario: Scenario) -> None:
        requests = [request for call in scenario.calls for request in call]
        # A row may have to hold the longest prompt's padding and the longest output
        row_length = max(len(r.prompt) for r in requests) + max(r.max_tokens for r in requests)
        rows = scenario.num_rows(row_length) if self.limited else scenario.max_num_seqs
        self.num_rows = rows if self.batch else 1

    def generate(self, requests: list[Request], recorder: CallRecorder) -> list[list[int]]:
        outputs: list[list[int]] = []
        for start in range(0, len(requests), self.num_rows):
            rows = requests[start : start + self.num_rows]
            tokens, times = self.generate_rectangle(rows, recorder)
            for i, request in enumerate(rows):
                outputs.append(tokens[i][: request.max_tokens])
                recorder.token_times[start + i] = times[: request.max_tokens]
        return outputs

    def generate_rectangle(self, rows: list[Request], recorder: CallRecorder) -> tuple[list[list[int]], list[float]]:
        """New tokens of every row, as many as the longest needs, and when each column of them was there."""
        longest = max(len(row.prompt) for row in rows)
        padded = [[0] * (longest - len(row.prompt)) + row.prompt for row in rows]
        mask = [[0] * (longest - len(row.prompt)) + [1] * len(row.prompt) for row in rows]
        clock = Clock(recorder.clock)
        result = self.model.generate(
            torch.tensor(padded, device=self.device),  # [B, L]
            attention_mask=torch.tensor(mask, device=self.device),
            max_new_tokens=max(row.max_tokens for row in rows),
            do_sample=False,
            use_cache=self.use_cache,
            stopping_criteria=[clock],
            return_dict_in_generate=True,
        )
        if self.use_cache:
            recorder.on_rectangle(len(rows), result.past_key_values.get_seq_length())
        tokens: list[list[int]] = result.sequences[:, longest:].tolist()
        return tokens, clock.times
