"""Stage 7: tensor parallelism.

What hurt:    one device holds the whole model and reads all of its weights for every token.
The idea:     cut every layer into parts, one for each rank, which is a process with a device of its own (Shoeybi et
              al., "Megatron-LM", 2019). A rank has some of the heads and some of the MLP's neurons: the matrix before
              them is cut by its outputs (column parallel), the one behind them by its inputs (row parallel), so that
              nothing between the two ever leaves the rank. One sum over all ranks after each of them makes the hidden
              state whole again. The vocabulary is cut as well. A leader schedules as in stage 5, and in each step it
              sends its workers one message with what to compute (`ranks.py` has the processes).
Still hurts:  two sums a layer must cross the wire, and every rank waits for the slowest. On a GPU each of them launches
              its kernels one by one, as before stage 6. The engine `nanovllm` brings all of it together.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.checkpoint import load_model, parameter_of, read_tensors
from stages.core import OnEvent, SamplingParams, Sequence, Trace, check_options, sample
from stages.model import Layer, ModelConfig, Transformer
from stages.ranks import Group, Team, devices_of
from stages.stage_3_paged_blocks import PagedKVCache, make_batch
from stages.stage_4_prefix_caching import PrefixCachingPool
from stages.stage_5_continuous_batching import ContinuousBatchingEngine, Scheduled, Scheduler


def share_of(c: ModelConfig, ranks: int) -> ModelConfig:
    """The numbers of one rank's model. Raises ValueError if the model cannot be cut into that many parts."""
    heads, kv_heads, neurons = c.num_attention_heads, c.num_key_value_heads, c.intermediate_size
    sizes = [n for n in range(1, heads + 1) if heads % n == neurons % n == (kv_heads % n and n % kv_heads) == 0]
    if ranks not in sizes:
        raise ValueError(
            f"tensor_parallel_size={ranks} does not fit this model of {heads} heads, {kv_heads} key/value heads and "
            f"{neurons} neurons; choose one of {', '.join(map(str, sizes))}"
        )
    # exercise 7.1: replace(c, ...) by what one rank has: its part of the heads, of the key/value heads (at least one),
    #   of the neurons (intermediate_size) and of the vocabulary, rounded up: of 511 tokens each of 2 ranks has 256.
    return replace(
        c,
        num_attention_heads=heads // ranks,
        num_key_value_heads=max(1, kv_heads // ranks),
        intermediate_size=c.intermediate_size // ranks,
        vocab_size=-(-c.vocab_size // ranks),
    )
    # end exercise


def cut(name: str, tensor: Tensor, c: ModelConfig, rank: int, ranks: int) -> Tensor:
    """This rank's part of a tensor of the checkpoint. A weight is [outputs, inputs], a bias [outputs].

    Norms work on what is whole on every rank, and so do the biases behind a sum: these are not cut.
    """
    layer = name.split(".")[-2]
    # exercise 7.2: o_proj and down_proj lose inputs (a weight's columns), k_proj and v_proj outputs, by key/value head:
    #   neighbours share one where ranks are more. q_proj, gate_proj and up_proj lose outputs, too, and embed_tokens and
    #   lm_head tokens, with rows of zeros below the last if there are too few.
    if layer in ("o_proj", "down_proj"):
        return tensor.chunk(ranks, dim=1)[rank] if tensor.dim() == 2 else tensor
    if layer in ("k_proj", "v_proj"):
        parts = min(ranks, c.num_key_value_heads)
        return tensor.chunk(parts)[rank * parts // ranks]
    if layer in ("q_proj", "gate_proj", "up_proj"):
        return tensor.chunk(ranks)[rank]
    if layer in ("embed_tokens", "lm_head"):
        rows = share_of(c, ranks).vocab_size
        part = tensor[rank * rows : (rank + 1) * rows]
        return F.pad(part, (0, 0, 0, rows - len(part)))
    return tensor
    # end exercise


class RowParallelLinear(nn.Linear):
    """Each rank has the columns of the weight that meet its part of x; the sum over the ranks is the product."""

    def __init__(self, linear: nn.Linear, group: Group) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """x [T, inputs / R] -> [T, outputs]"""
        y = self.group.all_reduce(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias  # after the sum, or it would be added by every rank


class VocabParallelEmbedding(nn.Embedding):
    """Each rank has the vectors of its own tokens, and gives zeros for all others."""

    def __init__(self, embedding: nn.Embedding, group: Group) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim)
        self.group = group

    def forward(self, ids: Tensor) -> Tensor:
        """ids [T] -> [T, H]"""
        # exercise 7.3: this rank's rows are the tokens from group.rank * self.num_embeddings on. Look up its own ids (a
        #   row that is not there cannot be looked up), put zeros for the others, and let the group sum.
        rows = ids - self.group.rank * self.num_embeddings
        own = (rows >= 0) & (rows < self.num_embeddings)
        vectors = F.embedding(rows.where(own, 0), self.weight)  # [T, H]
        return self.group.all_reduce(vectors.where(own[:, None], 0))
        # end exercise


def build_share(c: ModelConfig, group: Group) -> Transformer:
    """The model of one rank: smaller, and with a sum where the parts come together.

    Column-parallel layers need no code of their own. They are layers with fewer outputs, and that is all.
    """
    model = Transformer(share_of(c, group.size))
    model.embed_tokens = VocabParallelEmbedding(model.embed_tokens, group)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.self_attn.o_proj = RowParallelLinear(layer.self_attn.o_proj, group)
        layer.mlp.down_proj = RowParallelLinear(layer.mlp.down_proj, group)
    return model


def load_share(path: Path, c: ModelConfig, group: Group) -> Transformer:
    """This rank's part of a checkpoint, read a tensor at a time: the whole model is nowhere in memory."""
    with torch.device("meta"):
        model = build_share(c, group)
    wanted = model.state_dict().keys()
    tensors = {}
    for name, tensor in read_tensors(path):
        ours = parameter_of(name, c)
        if ours in wanted:
            part = cut(ours, tensor, c, group.rank, group.size)
            tensors[ours] = part.to(group.device, c.dtype, copy=True, memory_format=torch.contiguous_format)
    model.load_state_dict(tensors, assign=True)
    return model.requires_grad_(False).eval()


class Piece(NamedTuple):
    """All that a rank must know about one sequence in one step.

    A rank remembers nothing of a sequence but its keys and values. So there is no message for one that is preempted,
    resumed or cut into chunks: whatever has happened to it, its next piece says all.
    """

    start: int  # position of the first token
    token_ids: list[int]
    block_table: list[int]

    @classmethod
    def of(cls, seq: Sequence, n: int) -> Self:
        """The next `n` tokens of a sequence."""
        return cls(seq.num_computed, seq.token_ids[seq.num_computed : seq.num_computed + n], seq.block_table)

    def as_work(self) -> tuple[Sequence, int]:
        """As `make_batch` wants it. It looks at no token before `start`."""
        known = [0] * self.start + self.token_ids
        seq = Sequence(0, known, len(known), SamplingParams(), 0, self.block_table, num_computed=self.start)
        return seq, len(self.token_ids)


class Step(NamedTuple):
    """The message: what to compute, and whose logits are wanted."""

    pieces: list[Piece]
    sampled: list[int]  # pieces that reach the end of their sequence
    drawn: list[int]  # those of `sampled`, by their place in it, that want all logits, for a draw


class Rank:
    """One of the ranks: its part of the model, and the keys and values of its heads."""

    def __init__(
        self, group: Group, path: Path, config: ModelConfig, num_blocks: int, block_size: int, attention: str
    ) -> None:
        self.group, self.vocab_size = group, config.vocab_size
        self.block_size, self.attention = block_size, attention
        self.model = load_share(path, config, group)
        self.cache = PagedKVCache(self.model.config, num_blocks, block_size, group.device)

    @torch.inference_mode()
    def __call__(self, step: Step) -> tuple[Tensor, Tensor]:
        """Do this rank's part -> the best tokens of every rank [R, N, 2], and the logits to draw from [M, V]."""
        work = [piece.as_work() for piece in step.pieces]
        batch = make_batch(work, self.block_size, self.group.device, self.attention)
        hidden = self.model(batch.input_ids, batch.positions, partial(self.cache.attend, batch))  # [T, H]
        logits = self.model.logits(hidden[batch.last_tokens[step.sampled]])  # [N, V / R]
        best = self.group.all_gather(best_of(logits, self.group.rank, self.vocab_size))
        return best, self.group.all_gather(logits[step.drawn]).transpose(0, 1).flatten(1)


def best_of(logits: Tensor, rank: int, vocab_size: int) -> Tensor:
    """The best token of a rank's part of the vocabulary: logits [N, V / R] -> its logit and its id, [N, 2] float64."""
    # exercise 7.4: which ids are the columns? Those from vocab_size on are padding: their 0 would win where all others
    #   are negative. Of equals argmax finds the first. One torch.stack makes the pairs, in float64 (bf16 rounds ids).
    ids = rank * logits.shape[1] + torch.arange(logits.shape[1], device=logits.device)  # [V / R]
    scores = logits.masked_fill(ids >= vocab_size, float("-inf"))
    best = scores.argmax(dim=-1)  # [N]
    return torch.stack((scores.gather(1, best[:, None])[:, 0].double(), ids[best].double()), dim=-1)
    # end exercise


def winners(best: Tensor) -> list[int]:
    """The best of the ranks' best [R, N, 2]; of equals the lowest id, which is the lowest rank's: ids go by rank."""
    rank = best[:, :, 0].argmax(dim=0)  # [N], the first of the highest
    return [int(token) for token in best[:, :, 1].gather(0, rank[None])[0].tolist()]


class TensorParallelEngine(ContinuousBatchingEngine):
    """Stage 5 on several ranks. Close it (or use `with`) to end its workers; garbage collection does so as well."""

    def __init__(
        self,
        model: str,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        on_event: OnEvent | None = None,
        block_size: int = 16,
        num_blocks: int = 512,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        tensor_parallel_size: int = 2,
        attention: Literal["gather", "triton"] = "gather",
    ) -> None:
        sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        sizes |= {"block_size": block_size, "num_blocks": num_blocks, "tensor_parallel_size": tensor_parallel_size}
        check_options(**sizes, attention=attention)
        devices = devices_of(torch.device(device), tensor_parallel_size)
        if dtype is None and devices[0].type == "cpu":
            dtype = torch.float32
        # On "meta" every tensor is checked and none is read
        _, self.config, self.eos_token_ids, path = load_model(model, device="meta", dtype=dtype)
        share_of(self.config, tensor_parallel_size)
        self.device, self.trace = devices[0], Trace(on_event)
        self.pool = PrefixCachingPool(num_blocks, block_size)
        self.scheduler = Scheduler(self.pool, max_num_seqs, max_num_batched_tokens, self.trace)
        arguments = (path, self.config, num_blocks, block_size, attention)
        self.team = Team(devices)
        try:
            self.team.start(Rank, arguments)  # they load while the leader does
            self.rank = Rank(self.team.group, *arguments)
            self.team.join()
        except BaseException:
            self.team.close()
            raise
        self.model, self.cache = self.rank.model, self.rank.cache

    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
        """As in stage 5. Raises RuntimeError if the engine is closed, or if a rank is lost on the way."""
        if not self.team.close.alive:
            raise RuntimeError("this engine is closed: its workers have ended; make a new one")
        return super().generate(prompts, params)

    def run(self, plan: list[Scheduled]) -> list[int]:
        """As in stage 5, but every rank computes, and of most logits only the winner comes here."""
        sampled = [i for i, s in enumerate(plan) if s.sample]
        going_on = [plan[i].seq for i in sampled]
        drawn = [i for i, seq in enumerate(going_on) if seq.params.temperature > 0]
        message = Step([Piece.of(s.seq, s.num_tokens) for s in plan], sampled, drawn)
        self.rank.model = self.model  # who has put another in its place means this one
        with self.team.step(message):
            best, logits = self.rank(message)
            tokens = winners(best)
        draws = sample(logits[:, : self.config.vocab_size], [going_on[i] for i in drawn])
        for i, token in zip(drawn, draws, strict=True):
            tokens[i] = token
        return tokens

    def close(self) -> None:
        """End the workers and free what is shared with them. Closing again does nothing."""
        self.team.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
