"""One rank's data plane: models, KV cache and rows on one device, and the step that ties them together.

A step puts what is new into the rows, guesses tokens if speculation is on, computes the batch and samples (replayed, if
there is a recording), and finishes the rows whose sampling parameters ask for more. The runner knows nothing of
requests, queues or text. It never waits for the device: the tokens are copied to the host after the step, and only
their reader waits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.distributed.group import Group
from nanovllm.engine.plan import Scheduled, StepMasks, StepPlan
from nanovllm.graphs.cuda_graph import CudaGraphRecorder, Recorder, launch_once
from nanovllm.graphs.masked_tails import MaskedTails
from nanovllm.graphs.prompt_steps import RecordedSteps
from nanovllm.graphs.sizes import step_sizes
from nanovllm.kernels import fused_kernels
from nanovllm.models.loader import LoadedModel, load_model
from nanovllm.models.window_config import reach
from nanovllm.runner.batch import Batch, DecodeInputs, look_up, make_batch, pack
from nanovllm.runner.device_model import DeviceModel
from nanovllm.runner.draft import DraftModel, Guesses, PlannedGuesses, let_go
from nanovllm.runner.memory import num_kv_blocks, run_largest_step
from nanovllm.runner.prompt_logprobs import PromptLogprobs, piece_size, score_piece, score_prompts
from nanovllm.runner.rows import Known, Rows
from nanovllm.runner.step_output import StepOutput
from nanovllm.runner.warm_up import launch_unrecorded, rehearse
from nanovllm.sampling.masks import masks_of_rows
from nanovllm.sampling.sampler import Sampled, Sampler, gather_logits
from nanovllm.sampling.state import WORDS, Needs, SamplingState
from nanovllm.startup import part_of_start


class Computed(NamedTuple):
    """A step whose model has run, or is running, and whose last word on the tokens is `ModelRunner.draw`."""

    step: Sampled  # by the plain tail
    sampling: list[Scheduled]
    needs: Needs | None  # of the rows that sample
    q: Tensor | None  # see `PlannedGuesses.propose`
    prompts: PromptLogprobs | None = None  # what was asked of prompts
    tails: MaskedTails | None = None  # if the step gets masks, and a recorded tail can draw by them


class ModelRunner:
    """Runs plans on one device. `config` is resolved; if `config.num_kv_blocks` is None, it is measured.

    `recorder` makes steps replayable; None means CUDA graphs where the device, the attention backend and the
    configuration allow them. `group` joins the ranks, of which this is one. `with_masks`: whether steps may have masks.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        device: torch.device,
        recorder: Recorder | None = None,
        group: Group | None = None,
        with_masks: bool = False,
    ) -> None:
        assert config.max_model_len is not None and config.kvcache_block_size is not None
        self.closed = False  # set by `close`
        self.device, self.group = device, group or Group(0, 1, device)
        speculation, block_size = config.speculation, config.kvcache_block_size
        self.speculates = speculation is not None

        # Models: the target, and a draft if a model guesses. Each rank has the whole draft
        how = config.attention_backend, block_size, device, config.fp8_kv_cache
        self.target = DeviceModel(loaded.model, *how)
        self.backend, self.vocab_size = self.target.backend, loaded.config.vocab_size
        draft: DeviceModel | None = None
        if speculation is not None and speculation.model is not None:
            dtype, length = self.target.config.dtype, config.max_model_len
            weights = load_model(
                speculation.model, device=device, dtype=dtype, max_model_len=length, load_format=config.load_format
            )
            draft = DeviceModel(weights.model, *how)
        models = [model for model in (self.target, draft) if model is not None]
        self.window = reach([window for model in models for window in model.config.windows])
        if recorder is None and device.type == "cuda" and self.backend.capturable and not config.enforce_eager:
            recorder = CudaGraphRecorder(self.group.recorded)

        # KV cache: the memory that weights and the largest step leave; equally many blocks on all ranks
        largest_step = partial(run_largest_step, loaded.model, config, device, self.score_piece)
        configs = self.target.config, None if draft is None else draft.config
        num_blocks = num_kv_blocks(config, *configs, device, largest_step, with_graphs=recorder is not None)
        self.num_kv_blocks = self.group.smallest(num_blocks)
        for model in models:
            model.allocate_kv_cache(self.num_kv_blocks)

        # Rows: tokens, blocks and sampling parameters of each running sequence
        self.rows = Rows(config.max_num_seqs, config.max_model_len, block_size, self.num_kv_blocks, device, WORDS)
        # A rank of several does not see all logits, and a draft's guesses need distributions: the full tail has both.
        in_kernels = fused_kernels(device).sample_rows is not None and self.group.size == 1 and draft is None
        kept = self.rows.token_ids, self.vocab_size, loaded.eos_token_ids
        self.state = SamplingState(*kept, in_kernels, self.rows.numbers)
        self.sampler = Sampler(self.state, self.group)
        # With guesses, each token of a sequence has a mask of its own.
        self.records_tails = with_masks and in_kernels and not self.speculates

        # Recorded steps, and the source of guesses. On a GPU a rehearsal first launches all that they launch
        if device.type == "cuda":
            recording = partial(self._prepare, config, draft, None if recorder is None else launch_once)
            unrecorded = partial(self.warm_up, config.max_num_batched_tokens)
            rehearse(recording, unrecorded, [m.model for m in models], self.group)
        with part_of_start("recording"):
            self.recorded, self.guesses = self._prepare(config, draft, recorder)

    @torch.inference_mode()
    def run(self, plan: StepPlan, sequences: Mapping[int, Known]) -> Computed:
        """Submit the model's part of a step. Returns before the device is done with it."""
        self.update_rows(plan, sequences)
        sampling = [s for s in plan.scheduled if s.sample]
        needs = self.state.needs(s.row for s in sampling)
        q = None if self.guesses is None else self.guesses.propose(plan.scheduled, needs)
        if plan.scored:
            step, prompts = self.launch_and_score(plan)
            return Computed(step, sampling, needs, q, prompts)
        step = self.replay(plan.scheduled) or self.launch(plan.scheduled)
        if needs is not None or self.speculates:  # a mask is a need as well
            step = step.asked()
        tails = self.recorded.tails if plan.masked and self.recorded is not None else None
        tails = tails if tails is not None and tails.fit(plan.scheduled) else None
        return Computed(step, sampling, needs, q, tails=tails)

    @torch.inference_mode()
    def draw(self, computed: Computed, masks: StepMasks | None = None) -> StepOutput:
        """Submit the rest of a step, which must be the last that was run. masks: for structured outputs."""
        step, sampling, needs, q, prompts, tails = computed
        if tails is not None and masks is not None and masks.keys:
            step, masks = tails.replay(len(sampling), *masks_of_rows(masks, sampling, self.state)), None
        token_ids, logprobs = self.sampler.finish(step, sampling, needs, q, masks)
        wanted = [] if logprobs is None else [self.state.params[s.row].logprobs for s in sampling]
        num_sampled = [len(s.guesses) + 1 for s in sampling]
        return StepOutput(token_ids, step.guesses, num_sampled, logprobs, wanted, prompts, step.chosen)

    def update_rows(self, plan: StepPlan, sequences: Mapping[int, Known]) -> None:
        """Apply what a plan changes: rows given up, sequences that move into a row, new blocks of a row."""
        for row in plan.freed_rows:
            self.rows.owner[row] = -1
        if moving := [s for s in plan.scheduled if self.rows.owner[s.row] != s.key]:
            known = [sequences[s.key] for s in moving]
            self.rows.install(moving, known)
            num_prompt_tokens = [k.num_prompt_tokens for k in known]
            params = [k.params for k in known]
            self.state.install([s.row for s in moving], params, num_prompt_tokens, self.rows.writes)
        if growing := [s for s in plan.scheduled if s.new_blocks]:
            self.rows.append_blocks(growing)
        self.rows.writes.send()

    def replay(self, scheduled: Sequence[Scheduled]) -> Sampled | None:
        """Compute and sample by a recorded step; None if there is no recording for this work."""
        return None if self.recorded is None else self.recorded.replay(scheduled)

    def launch(self, scheduled: Sequence[Scheduled]) -> Sampled:
        """Compute and sample kernel by kernel."""
        all_greedy = self.state.all_greedy(s.row for s in scheduled if s.sample)
        return self.compute(make_batch(scheduled, self.rows), all_greedy=all_greedy)

    def launch_and_score(self, plan: StepPlan) -> tuple[Sampled, PromptLogprobs]:
        """The same for a plan that asks for log-probabilities of prompts: they need all hidden states."""
        batch, row_of = make_batch(plan.scheduled, self.rows), {s.key: s.row for s in plan.scheduled}
        hidden = self.target.hidden(batch)  # [T, H]
        wanted = [self.state.params[row_of[s.key]].prompt_logprobs or 0 for s in plan.scored]
        prompts = score_prompts(hidden, plan, wanted, self.rows, self.head, self.vocab_size)
        return self.sample(batch, hidden), prompts

    def score_piece(self, hidden: Tensor) -> None:
        """Of hidden states [T, H] score as many as a piece has, and forget what is found: only to see what it takes."""
        some = hidden[: piece_size(self.vocab_size, 0)]
        score_piece(some, torch.zeros(len(some), dtype=torch.int64, device=self.device), 0, self.head)

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> logits [N, V] of the whole vocabulary, on every rank."""
        return gather_logits(self.target.model.logits(hidden), self.group, self.vocab_size)

    def compute(self, batch: Batch, logits_out: Tensor | None = None, all_greedy: bool = False) -> Sampled:
        """From a batch to tokens. This is launched, or recorded and replayed."""
        return self.sample(batch, self.target.hidden(batch), logits_out, all_greedy)

    def sample(
        self, batch: Batch, hidden: Tensor, logits_out: Tensor | None = None, all_greedy: bool = False
    ) -> Sampled:
        """From hidden states [T, H] to tokens, which are written into the rows."""
        rows, positions = batch.sampled_rows, batch.next_positions
        # Where tokens will be sampled, the rows hold the guesses; after the last guess, nothing that is looked at.
        guesses = self.rows.token_ids[rows, positions].long() if self.speculates else None  # [N]
        logits = self.target.logits(hidden, batch, logits_out)  # [N, V]
        token_ids = self.sampler.sample(logits, rows, positions, all_greedy)
        return Sampled(rows, positions, token_ids, logits, guesses)

    def _prepare(
        self, config: EngineConfig, draft: DeviceModel | None, recorder: Recorder | None
    ) -> tuple[RecordedSteps | None, Guesses]:
        """Record steps, and make the source of guesses."""
        recorded = None if recorder is None else self._record(config, recorder)
        guesses: Guesses = None
        if draft is not None:
            guesses = DraftModel(draft, config, self.rows, self.state, recorder)
        elif self.speculates:
            guesses = PlannedGuesses(self.rows)
        return recorded, guesses

    @torch.inference_mode()
    def _record(self, config: EngineConfig, recorder: Recorder) -> RecordedSteps:
        """Recordings of decode steps and of steps with prompts, which share the memory of their logits."""
        sizes = step_sizes(config, self.target.config)
        logits = self.target.make_logits(sizes.num_logits)
        if self.backend.eager_prefill:
            sizes = replace(sizes, prompts=[])
        inputs, longest = DecodeInputs(self.rows, sizes.decodes[-1]), self.rows.max_context_len

        def decode_step(numbers: Tensor) -> Sampled:
            return self.compute(inputs.look_up(numbers), logits)

        def prompt_step(parts: Sequence[Tensor], long_context: bool) -> Sampled:
            num_tokens = len(parts[0])
            return self.compute(look_up(parts, self.rows, 0, num_tokens, longest, long_context), logits)

        def masked_tail(numbers: Tensor, masked: Tensor, masks: Tensor) -> Sampled:
            rows = numbers[0]
            step = logits[: len(rows)], rows, inputs.context_len[: len(rows)]  # as `decode_step` left them
            token_ids = self.sampler.sample_masked(*step, masked, masks)
            return Sampled(rows, step[2], token_ids, step[0], None)

        masked = (masked_tail, self.state.mask.shape[1]) if self.records_tails else None
        return RecordedSteps(sizes, self.rows.token_ids, decode_step, prompt_step, pack, recorder, masked)

    @torch.inference_mode()
    def warm_up(self, max_num_tokens: int) -> None:
        """Launch one step of each kind that is not recorded."""
        launch_unrecorded(self.compute, self.rows, max_num_tokens)
        c = self.target.config
        self.score_piece(torch.zeros(1, c.hidden_size, dtype=c.dtype, device=self.device))

    def close(self) -> None:
        """Give all memory back, even if this object is still referenced. Nothing can be run afterwards."""
        if not self.closed:
            self.closed = True
            let_go(self.guesses)
            del self.target, self.backend, self.rows, self.state, self.sampler, self.recorded, self.guesses
            del self.group  # which knows the recorded graphs
