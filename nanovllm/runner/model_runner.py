"""One rank's data plane: weights, KV cache and rows on one device, and the step that ties them together.

A step is: put what is new into the rows, build the batch, run the model, sample, write the sampled tokens into the
rows. It knows nothing of requests, queues or text, and never waits for the device: the tokens are copied to the host
behind the step, and whoever reads them waits.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention import AttentionBackend, select_backend
from nanovllm.attention.interface import AttentionMetadata, BoundAttention
from nanovllm.config import EngineConfig
from nanovllm.distributed.group import Group
from nanovllm.engine.plan import Scheduled, StepPlan, TokenLogprobs
from nanovllm.graphs.chunk_graphs import MAX_SEQUENCES, ChunkGraphs, chunk_sizes
from nanovllm.graphs.cuda_graphs import (
    MAX_READ,
    CudaGraphRecorder,
    DecodeBatch,
    DecodeGraphs,
    Recorder,
    recorded_sizes,
    warm_up,
)
from nanovllm.kernels import fused_kernels
from nanovllm.models.loader import LoadedModel
from nanovllm.runner.batch import make_batch
from nanovllm.runner.draft import DraftModel, load_draft
from nanovllm.runner.memory import num_kv_blocks
from nanovllm.runner.rows import Known, Rows, to_device
from nanovllm.sampling.logprobs import TopLogprobs
from nanovllm.sampling.rejection import accept_or_redraw
from nanovllm.sampling.sampler import Draws, gather_logits, ids_of_share, sample_full, sample_plain, sample_sharded
from nanovllm.sampling.sampling_state import Needs, SamplingState


class StepOutput:
    """What a step sampled, on its way to the host.

    token_ids [N] int64: of each sequence one for every guess and one more. guesses [N] int64: what had been guessed
    there, None if nothing was. num_draws: how many of the N are each sequence's. wanted: how many log-probabilities
    each sequence asked for, None for none.
    """

    def __init__(
        self,
        token_ids: Tensor,
        guesses: Tensor | None,
        num_draws: list[int],
        logprobs: TopLogprobs | None,
        wanted: list[int | None],
    ) -> None:
        self.num_draws, self.wanted = num_draws, wanted
        self.ready: torch.cuda.Event | None = None
        self.token_ids, self.guesses, self.logprobs = token_ids, guesses, logprobs
        if token_ids.is_cuda:
            self.token_ids = token_ids.to("cpu", non_blocking=True)
            self.guesses = guesses.to("cpu", non_blocking=True) if guesses is not None else None
            self.logprobs = logprobs.to("cpu", non_blocking=True) if logprobs is not None else None
            self.ready = torch.cuda.Event()
            self.ready.record()

    def read(self) -> list[tuple[list[int], list[TokenLogprobs] | None]]:
        """The new tokens of the step's sequences in order, up to the first that is not what was guessed, -1 for a bad
        row; and log-probabilities where wanted."""
        if self.ready is not None:
            self.ready.synchronize()
        token_ids = self.token_ids.tolist()
        if self.guesses is None and self.logprobs is None:  # almost always: one token each
            return [([token], None) for token in token_ids]
        guesses = token_ids if self.guesses is None else self.guesses.tolist()
        logprobs: list[TokenLogprobs | None] = []
        if self.logprobs is not None:
            wanted = [n for n, times in zip(self.wanted, self.num_draws, strict=True) for _ in range(times)]
            logprobs = self.logprobs.per_row(wanted)
        found: list[tuple[list[int], list[TokenLogprobs] | None]] = []
        first = 0
        for n, num_draws in zip(self.wanted, self.num_draws, strict=True):
            last = first
            while last < first + num_draws - 1 and token_ids[last] == guesses[last]:
                last += 1
            rows = [row for row in logprobs[first : last + 1] if row is not None]
            found.append((token_ids[first : last + 1], None if n is None else rows))
            first += num_draws
        return found


class ModelRunner:
    """Runs plans on one device. `config` is resolved; `config.num_kv_blocks` may be None, then it is measured.

    `recorder` makes steps replayable; None means CUDA graphs where the device, the attention backend and the
    configuration allow them. `group` joins the ranks, of which this is one.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        device: torch.device,
        recorder: Recorder | None = None,
        group: Group | None = None,
    ) -> None:
        assert config.max_model_len is not None and config.kvcache_block_size is not None
        self.device = device
        self.group = group or Group(0, 1, device)
        self.model, self.vocab_size = loaded.model, loaded.config.vocab_size
        c = loaded.model.config  # of this rank's share: its heads, its part of the vocabulary
        self.block_size = config.kvcache_block_size
        self.scale = c.head_dim**-0.5
        self.backend: AttentionBackend = select_backend(
            config.attention_backend, device=device, head_dim=c.head_dim, block_size=self.block_size, dtype=c.dtype
        )
        if recorder is None and device.type == "cuda" and self.backend.capturable and not config.enforce_eager:
            recorder = CudaGraphRecorder(self.group.recorded)
        speculation = config.speculation
        self.speculates = speculation is not None
        draft = None if not (speculation and speculation.model) else load_draft(speculation.model, c, config, device)
        self.num_kv_blocks = num_kv_blocks(
            config,
            c,
            None if draft is None else draft.config,
            device,
            lambda: self.run_largest_step(config),
            with_graphs=recorder is not None,
        )
        self.num_kv_blocks = self.group.smallest(self.num_kv_blocks)
        # Keys and values of a layer: [2, num_blocks + 1, block_size, Hkv, D]; the last block is scratch, for padding
        shape = (2, self.num_kv_blocks + 1, self.block_size, c.num_key_value_heads, c.head_dim)
        self.kv = [torch.zeros(shape, dtype=c.dtype, device=device) for _ in range(c.num_hidden_layers)]
        self.rows = Rows(config.max_num_seqs, config.max_model_len, self.block_size, self.num_kv_blocks, device)
        self.sampling = SamplingState(
            self.rows.token_ids, self.rows.num_prompt_tokens, self.vocab_size, loaded.eos_token_ids
        )
        self.graphs: DecodeGraphs | None = None
        if recorder is not None:
            sizes, key_bytes = recorded_sizes(config), 2 * c.num_key_value_heads * c.head_dim * c.dtype.itemsize
            max_samples = max(sizes[-1], MAX_SEQUENCES)
            self.logits = torch.empty(max_samples, c.vocab_size, dtype=c.dtype, device=device)  # [B, V]
            with torch.inference_mode():
                self.graphs = DecodeGraphs(self.rows, sizes, self.decode, recorder, MAX_READ // key_bytes)
                sizes = [] if self.backend.eager_prefill else chunk_sizes(config, c)
                self.chunks = ChunkGraphs(self, sizes, recorder)
        self.draft = None if draft is None else DraftModel(draft, config, self.rows, self.sampling, recorder)
        if device.type == "cuda":
            warm_up(self, config.max_num_batched_tokens)

    @torch.inference_mode()
    def run(self, plan: StepPlan, sequences: Mapping[int, Known]) -> StepOutput:
        """Submit one step. Returns before the device is done with it."""
        self.update_rows(plan, sequences)
        sampled = [s for s in plan.scheduled if s.sample]
        needs = self.sampling.needs(s.row for s in sampled)
        q: Tensor | None = None
        guesses: Tensor | None = None
        if self.draft is not None:
            q = self.draft.propose(plan.scheduled, needs or Needs(), self.all_greedy(sampled))
        elif guessed := [s for s in sampled if s.guesses]:
            self.rows.write_guesses(guessed)
        num_draws = [len(s.guesses) + 1 for s in sampled]
        n = sum(num_draws)
        replayed = None
        if self.graphs is not None:
            replayed = self.graphs.replay(plan.scheduled) or self.chunks.replay(plan.scheduled)
        if replayed is not None:
            rows, positions, token_ids, logits, before = replayed
            guesses = before if self.speculates else None
        else:
            batch = make_batch(plan.scheduled, self.rows)
            rows, positions = batch.sampled_rows, batch.next_positions
            if self.speculates:
                # What stands where tokens will be sampled is the guesses, and behind them nothing that is looked at.
                guesses = self.rows.token_ids[rows, positions].long()  # [N]
            hidden = self.model(batch.input_ids, batch.positions, self.bind_attention(batch.attention))  # [T, H]
            logits = self.model.logits(hidden[batch.sampled_tokens])  # [N, V]
            token_ids = self.draw(logits, rows, positions, self.all_greedy(sampled))
        if needs is None and q is None:
            return StepOutput(token_ids, guesses, num_draws, None, [None] * len(sampled))
        if guesses is not None:  # the plain tail wrote over them, and what is drawn behind them counts them
            self.rows.token_ids[rows, positions] = guesses.int()
        # The full tail draws again, but only for the rows that need it: the vocabulary is not sorted for the others.
        special = np.isin(np.repeat([s.row for s in sampled], num_draws), list(self.sampling.special))
        index = to_device(np.flatnonzero(special | (q is not None)), self.device)
        logits = logits[index]
        if self.group.size > 1:
            logits = gather_logits(logits, self.group, self.vocab_size)
        verify = None if q is None or guesses is None else partial(accept_or_redraw, guesses=guesses, q=q)
        draws = self.draws(rows[index], positions[index])
        drawn, logprobs = sample_full(logits, draws, rows[index], self.sampling, needs or Needs(), verify)
        token_ids = token_ids.index_copy(0, index, drawn)
        self.rows.token_ids[rows, positions] = token_ids.clamp(min=0).int()
        wanted = [self.rows.params[s.row].logprobs for s in sampled]
        return StepOutput(token_ids, guesses, num_draws, logprobs and logprobs.spread(index, n), wanted)

    def decode(self, batch: DecodeBatch) -> tuple[Tensor, Tensor]:
        """A decode step on static tensors, everything from rows and positions to the tokens: what graphs record."""
        batch.look_up(self.rows)
        if self.speculates:
            batch.guesses.copy_(self.rows.token_ids[batch.sampled_rows, batch.next_positions])
        hidden = self.model(batch.input_ids, batch.positions, self.bind_attention(batch.attention))  # [B, H]
        logits = self.model.logits(hidden, self.logits[: batch.size])  # [B, V]
        return self.draw(logits, batch.sampled_rows, batch.next_positions), logits

    def update_rows(self, plan: StepPlan, sequences: Mapping[int, Known]) -> None:
        """Apply what a plan changes: rows given up, sequences that move into a row, new blocks of a row."""
        for row in plan.freed_rows:
            self.rows.owner[row] = -1
        if moving := [s for s in plan.scheduled if self.rows.owner[s.row] != s.key]:
            known = [sequences[s.key] for s in moving]
            self.rows.install(moving, known)
            self.sampling.install([s.row for s in moving], [k.params for k in known])
        if growing := [s for s in plan.scheduled if s.new_blocks]:
            self.rows.append_blocks(growing)

    def all_greedy(self, scheduled: list[Scheduled]) -> bool:
        return all(self.rows.params[s.row].temperature == 0 for s in scheduled)

    def bind_attention(self, meta: AttentionMetadata) -> BoundAttention:
        return BoundAttention(self.backend, self.kv, meta, self.scale)

    def draws(self, rows: Tensor, next_positions: Tensor, all_greedy: bool = False) -> Draws:
        r = self.rows
        return Draws(r.temperature[rows], r.seed[rows], next_positions - r.num_prompt_tokens[rows], all_greedy)

    def draw(self, logits: Tensor, rows: Tensor, next_positions: Tensor, all_greedy: bool = False) -> Tensor:
        """The plain tail: logits [N, V] -> token ids [N] int64, written into the rows as well."""
        r = self.rows
        sample_rows = fused_kernels(self.device).sample_rows
        if sample_rows is not None:
            state = r.temperature, r.seed, r.num_prompt_tokens, r.token_ids
            share = ids_of_share(logits, self.group, self.vocab_size)
            return sample_rows(logits, rows, next_positions, *state, *share, self.group.all_gather)
        draws = self.draws(rows, next_positions, all_greedy)
        if self.group.size > 1:
            token_ids = sample_sharded(logits, draws, self.group, self.vocab_size)
        else:
            token_ids = sample_plain(logits, draws)
        r.token_ids[rows, next_positions] = token_ids.clamp(min=0).int()
        return token_ids

    @torch.inference_mode()
    def run_largest_step(self, config: EngineConfig) -> None:
        """A step of the largest size, without attention, to see how much memory it takes."""
        assert config.max_model_len is not None
        num_tokens = config.max_num_batched_tokens
        input_ids = torch.zeros(num_tokens, dtype=torch.int32, device=self.device)
        positions = torch.arange(num_tokens, dtype=torch.int32, device=self.device) % config.max_model_len
        hidden = self.model(input_ids, positions, lambda layer, q, k, v: torch.empty_like(q))
        max_draws = 1 if config.speculation is None else 1 + config.speculation.k
        num_rows = min(config.max_num_seqs * max_draws, num_tokens)
        logits = self.model.logits(hidden[:num_rows])
        zeros = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        draws = Draws(torch.ones(num_rows, device=self.device), zeros, zeros)
        if config.speculation is not None and config.speculation.model is not None:
            accept_or_redraw(logits.float(), draws, zeros, logits.float())
        else:
            sample_plain(logits, draws)

    def close(self) -> None:
        """Give all memory back, whoever may still hold this object. Nothing can be run afterwards."""
        vars(self).clear()
