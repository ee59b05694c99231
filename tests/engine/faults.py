"""Plausible mistakes in the control plane, each planted by editing the source of one or two functions.

The shadow-KV histories must catch every one of them: that is the test of the tests.
"""

import __future__

import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest

from nanovllm.engine import block_manager
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Content


@dataclass(frozen=True)
class Edit:
    owner: Any  # the class or module that has the function
    function: str
    old: str
    new: str

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        function = inspect.unwrap(getattr(self.owner, self.function))
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.function} has {self.old!r} {source.count(self.old)} times"
        edited = source.replace(self.old, self.new)
        code = compile(edited, self.function, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
        made: dict[str, Any] = {}
        exec(code, function.__globals__, made)
        patch.setattr(self.owner, self.function, made[self.function])


FAULTS: dict[str, list[Edit]] = {
    # Blocks and the prefix cache
    "a shared block is not counted for its new user": [
        Edit(
            BlockManager, "share", "self.ref_counts[block] += 1", "self.ref_counts[block] += not self.ref_counts[block]"
        )
    ],
    "a refilled block is still found under its old name": [
        Edit(BlockManager, "_take", "self._forget(block)", "self.contents[block] = None")
    ],
    "a block's name forgets what came before it": [
        Edit(block_manager, "chained_digest", "parent + ", ""),
        Edit(Content, "matches", "self.parent is parent and ", ""),
    ],
    "a collision of digests is believed": [
        Edit(block_manager, "chained_digest", "xxhash.xxh3_128_digest(", "len("),
        Edit(Content, "matches", "self.parent is parent and self.tokens == tokens and ", ""),
    ],
    "the salt is ignored": [
        Edit(block_manager, "root_digest", "cache_salt is None", "True"),
        Edit(Content, "matches", " and self.cache_salt == cache_salt", ""),
    ],
    "a whole prompt is taken from the cache": [
        Edit(BlockManager, "find_prefix", "else len(seq.token_ids) - 1", "else len(seq.token_ids)")
    ],
    "a sequence evicts its own hits": [Edit(BlockManager, "share", "self.free.pop(block, None)", "pass")],
    "free hits are not counted as needed": [
        Edit(BlockManager, "num_needed", "sum(self.ref_counts[block] > 0 for block in cached)", "len(cached)")
    ],
    "a half-computed block is published": [
        Edit(BlockManager, "publish", "num_computed // self.block_size", "-(-num_computed // self.block_size)")
    ],
    "blocks are published when they are planned": [
        Edit(
            Scheduler,
            "_finish_plan",
            "seq.num_in_flight += 1",
            "seq.num_in_flight += 1; self.blocks.publish(seq, min(end, len(seq.token_ids)))",
        )
    ],
    "a table is one block short at a border": [
        Edit(BlockManager, "num_blocks_for", "-(-num_tokens // self.block_size)", "num_tokens // self.block_size")
    ],
    "what a failed row computed stays in the cache and its blocks stay taken": [
        Edit(Scheduler, "commit", 'self.finish(seq, "error")', 'del self.sequences[key]; seq.finish_reason = "error"')
    ],
    # Preemption
    "a preempted sequence keeps its block table on the device": [
        Edit(Scheduler, "_release", "seq.num_computed = seq.num_blocks_sent = 0", "seq.num_computed = 0")
    ],
    "a preempted sequence is taken for computed": [
        Edit(Scheduler, "_release", "seq.num_computed = seq.num_blocks_sent = 0", "seq.num_blocks_sent = 0"),
        Edit(Scheduler, "_start", "seq.num_computed = len(cached) * self.block_size", "pass"),
    ],
    "a preempted sequence stays in the plan": [Edit(Scheduler, "_preempt", "if seq.num_planned:", "if False:")],
    "a preempted sequence queues up at the back": [
        Edit(Scheduler, "_preempt", "insort(self.waiting, seq", "seq.arrival += 1000; insort(self.waiting, seq")
    ],
    "the one preempted is the foremost": [Edit(Scheduler, "_preempt", "self.running.pop()", "self.running.pop(0)")],
    "equals take seats from each other": [
        Edit(Scheduler, "_claim_seat", "victim.priority <= seq.priority", "victim.priority < seq.priority"),
        Edit(
            Scheduler,
            "_admit",
            "self.running[-1].priority <= seq.priority",
            "self.running[-1].priority < seq.priority",
        ),
    ],
    "the waiting overtake one that does not fit": [
        Edit(
            Scheduler,
            "_admit",
            "if not self._claim_seat(seq, cached):",
            "if not self._claim_seat(seq, cached):\n"
            "            del self.waiting[0]; self._admit(); self.waiting.insert(0, seq)",
        )
    ],
    # The first that waits is not looked up again for nothing
    "more of its text is published, and the first is not looked up again": [
        Edit(Scheduler, "_publish", "self._looked_up = None", "pass")
    ],
    "the first starts with hits that were evicted while it waited": [
        Edit(
            Scheduler,
            "_admit",
            "cached = self.blocks.find_prefix(seq)",
            "cached = self.hits = self.hits if self._looked_up is seq else self.blocks.find_prefix(seq)",
        )
    ],
    "the first waits for more blocks than it needs": [
        Edit(Scheduler, "_may_fit", "self._num_needed <= most", "self._num_needed < most")
    ],
    "the first waits without a look at those it may preempt": [
        Edit(Scheduler, "_may_fit", "v.priority > seq.priority", "False")
    ],
    # Log-probabilities of prompts
    "a prompt that is to be scored is taken from the cache": [
        Edit(BlockManager, "find_prefix", "seq.num_scored if seq.num_scored < seq.num_to_score else ", "")
    ],
    "a preempted prompt is scored again": [
        Edit(Scheduler, "_release", "self._scoring.pop(seq, None)", "seq.num_scored = 0")
    ],
    "what is left to score of a preempted prompt is forgotten": [
        Edit(Scheduler, "_start", "seq.num_scored < seq.num_to_score", "not seq.num_preemptions and seq.num_to_score")
    ],
    "the last token of a chunk is scored twice": [
        Edit(Scheduler, "_score", "seq.num_scored = end", "seq.num_scored = end - 1")
    ],
    # Steps in flight
    "a sequence comes back before its pending token is known": [
        Edit(Scheduler, "_admit", "if seq.num_in_flight:", "if False:")
    ],
    "a surplus token is kept": [
        Edit(Scheduler, "finish", "del self.sequences[seq.key]", "seq.num_in_flight or self.sequences.pop(seq.key)")
    ],
    "results are matched by row": [
        Edit(
            Scheduler,
            "commit",
            "for key, _, start, num_tokens, sample, _, guesses in plan.scheduled:\n"
            "        seq = self.sequences.get(key)",
            "for key, row, start, num_tokens, sample, _, guesses in plan.scheduled:\n"
            "        seq = next((seq for seq in self.running if seq.row == row), None)",
        )
    ],
    "the last token is not foreseen": [Edit(Scheduler, "schedule", "seq.num_known < seq.limit", "True")],
    "a row is not reported as freed": [Edit(Scheduler, "_release", "self._freed_rows.append(seq.row)", "pass")],
    # Chunks, ends, choices
    "every chunk samples": [Edit(Scheduler, "_finish_plan", "end == seq.num_known", "True")],
    "the token budget counts cached tokens": [
        Edit(
            Scheduler,
            "_admit",
            "min(seq.num_known - seq.num_computed, self._budget)",
            "min(seq.num_known, self._budget)",
        )
    ],
    "the end-of-sequence token ends nothing before the length does": [
        Edit(Scheduler, "_append", "token in seq.stop_ids", "False")
    ],
    "an abort leaves the blocks taken": [
        Edit(LLMEngine, "abort_request", 'self.scheduler.finish(choice.seq, "abort")', "pass")
    ],
    "all choices draw with one seed": [
        Edit(LLMEngine, "add_request", "derive_seed(seed, choice)", "derive_seed(seed, 0)")
    ],
    # Structured outputs
    "all choices share one matcher": [Edit(LLMEngine, "add_request", "matcher and matcher.copy()", "matcher")],
    "masks are filled before the token before them is known": [
        Edit(
            LLMEngine,
            "_advance",
            "committed = self._commit_oldest() if self._in_flight else []",
            "plan.masked and (handle.draw(self._masks(plan, handle)), plan.masked.clear())\n"
            "    committed = self._commit_oldest() if self._in_flight else []",
        )
    ],
    "a token is drawn without the mask of a sequence that just started": [
        Edit(Scheduler, "add", "self.num_matchers += seq.matcher is not None", "pass")
    ],
    "a chunk that does not sample waits for a mask": [
        Edit(Scheduler, "_finish_plan", "if s.sample and self.sequences", "if self.sequences")
    ],
    "a preempted matcher starts anew": [
        Edit(
            Scheduler,
            "_preempt",
            "seq.num_preemptions += 1",
            "seq.num_preemptions += 1; seq.matcher and seq.matcher.__init__()",
        )
    ],
}

FAULTS_OF_WINDOWS: dict[str, list[Edit]] = {
    "the first key of the window is given back": [
        Edit(BlockManager, "release_unseen", "seq.num_computed + 1 - self.window", "seq.num_computed + 2 - self.window")
    ],
    "a block that is not published yet is given back": [
        Edit(BlockManager, "release_unseen", "if self.enable_prefix_caching:", "if False:")
    ],
    "a block is given back early, and again at the end": [
        Edit(BlockManager, "release", "max(num_kept, seq.num_unseen)", "num_kept")
    ],
    "a block is given back at every border": [
        Edit(BlockManager, "release_unseen", "[seq.num_unseen : num_unseen]", "[:num_unseen]")
    ],
    "a resumed sequence is taken for one that gave blocks back": [
        Edit(BlockManager, "share", "seq.num_unseen = 0", "pass")
    ],
    "blocks that a victim gave back count as its own": [
        Edit(Scheduler, "_claim_seat", "victim.block_table[victim.num_unseen :]", "victim.block_table")
    ],
}
