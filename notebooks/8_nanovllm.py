# %% [markdown]
# # 8. nanovllm: one request through the real engine
#
# Five stages, one idea each, and at the end of them a complete engine in five files (stages 6 and 7 add recordings and
# ranks). The package `nanovllm` is the same engine again, built to be fast and to be used. Nothing in it will be new to
# you, but everything has moved, because here *who decides* and *who computes* live apart.
#
# - The **control plane**, `nanovllm/engine/`, knows requests, queues, priorities and blocks. It is plain Python; it
#   does not even import torch.
# - The **data plane**, `nanovllm/runner/` and below, knows rows, slots and tensors. It has never heard of a request.
#
# Between them runs one small message a step. This notebook follows it.
#
# **About 35 minutes.** You need notebook 5. There are no holes to fill: nothing is left out here.

# %%
import inspect
import sys
from unittest.mock import patch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import scheduler
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.plan import Scheduled, StepPlan, StepResult
from nanovllm.engine.scheduler import Scheduler
from stages import stage_5_continuous_batching
from stages.stage_5_continuous_batching import ContinuousBatchingEngine
from tools.pictures.blocks import block_map
from tools.pictures.plots import bars
from tools.pictures.steps import swimlane
from tools.pictures.three_requests import (
    BLOCK_SIZE,
    LOTTE,
    NAMES,
    NUM_BLOCKS,
    ROOT,
    SEATS,
    STORY_MODEL,
    Run,
    compare,
    hugging_face_greedy,
    load_tokenizer,
    record,
    source,
    three_requests,
)

tokenizer = load_tokenizer()
prompts, stage_params = three_requests()
params = [SamplingParams(temperature=0, max_tokens=p.max_tokens) for p in stage_params]
SMALL = {"device": "cpu", "max_num_seqs": SEATS, "kvcache_block_size": BLOCK_SIZE, "num_kv_blocks": NUM_BLOCKS}


def as_drawn(events):  # the pictures number requests and count steps from 1
    return [e | {"request": int(e["request"]), "step": e["step"] + (e["type"] != "added")} for e in events]


def run(prompts, params, **config):
    with LLM(STORY_MODEL, on_event=(events := []).append, **SMALL | config) as llm:
        return Run([o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)], as_drawn(events))


# %% [markdown]
# ## The three requests

# %%
whole = run(prompts, params)
swimlane(whole.events, names=NAMES, title="nanovllm: who runs when")

# %%
block_map(whole.events, NUM_BLOCKS, names=NAMES, title="nanovllm: which block holds what")

# %% [markdown]
# You have seen these pictures. The engine makes the very decisions that stage 5 made:

# %%
# NBVAL_CHECK_OUTPUT
stage = record(ContinuousBatchingEngine, max_num_seqs=SEATS, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
kinds = ("added", "admitted", "scheduled", "finished")
ours, theirs = (
    [[e[key] for key in ("step", "type", "request")] for e in r.events if e["type"] in kinds] for r in (whole, stage)
)
print("same tokens:   ", whole.outputs == stage.outputs)
print("same decisions:", sorted(map(str, ours)) == sorted(map(str, theirs)), f"({len(ours)} of them)")

# %% [markdown]
# ## What hurts
#
# So why a second engine? Stage 5 does one thing after the other: decide, compute, look at the tokens, decide. On a GPU
# the computing takes a millisecond, and then the GPU stands still while Python thinks. To let Python think *during* the
# step, the two must not share anything that either of them changes. That is the reason for the two planes.
#
# The second reason is you. Filters, log-probabilities, stop strings, priorities, three attention backends: if these
# were in the five files of the stages, nobody would find the idea in them any more.
#
# ## Where everything went
#
# | stage | its idea | the module that it became |
# |---|---|---|
# | 1 | tokens, logits, sample, append | `sampling/sampler.py`; beside it `filters`, `noise`, `logprobs` |
# | 2 | keep keys and values | `runner/device_model.py`, which owns the tensors; `runner/memory.py`, which sizes them |
# | 3 | blocks, tables, slots | `engine/block_manager.py` (who has which), `runner/batch.py` (slots), `attention/` |
# | 3 | the kernel beside it | `paged_prefill.py` and `paged_decode.py` in `kernels/attention/` |
# | – | the same on Hopper | `kernels/hopper/warp_specialized_prefill.py`, `kernels/hopper/ring_decode.py` |
# | 4 | chained hashes, ref counts, LRU | `engine/block_manager.py` |
# | 5 | queues, budget, chunks, preemption | `engine/scheduler.py`, `engine/sequence.py` |
# | 6 | recordings, buckets, padding | `graphs/decode_steps.py`; of prompts `graphs/prompt_steps.py` |
# | 7 | shares, sums, ranks | `models/sharding.py`, `distributed/`, `workers/parallel_executor.py` |
# | `core.py` | parameters, events | `sampling_params.py`, `engine/trace.py` |
# | `model.py` | a model that never sees a batch | `models/transformer.py`, `layers/` |
# | `checkpoint.py` | strict about every tensor | `models/loader.py`, `models/checkpoint.py`, `models/config.py` |
#
# New is what a user needs: `llm.py`, `text/detokenizer.py` (text and stop strings),
# `engine/request.py` (what is refused, and what comes back), `cli.py`.

# %%
# NBVAL_CHECK_OUTPUT
became = """
sampling/sampler sampling/filters sampling/noise sampling/logprobs runner/device_model runner/memory
engine/block_manager runner/batch kernels/attention/paged_prefill kernels/attention/paged_decode engine/scheduler
engine/sequence sampling_params engine/trace models/transformer models/loader models/checkpoint
models/config llm engine/request text/detokenizer cli
""".split()
print(sum((ROOT / "nanovllm" / f"{name}.py").is_file() for name in became), "of", len(became), "are there")

# %% [markdown]
# ## Guess first
#
# A decode step of one request: from `engine.step()` to the token and back. **Guess:** through how many files of
# `nanovllm` does it go?

# %%
my_guess = None  # files

# %%
with LLM(STORY_MODEL, **SMALL) as llm:
    llm.engine.add_request("A", prompts[0], params[0])
    llm.engine.step()  # the prompt
    visited: dict[str, None] = {}  # in order
    sys.setprofile(lambda frame, event, argument: visited.setdefault(frame.f_code.co_filename.replace("\\", "/")))
    llm.engine.step()  # one decode
    sys.setprofile(None)
files = [name.rpartition("/nanovllm/")[2] for name in visited if "/nanovllm/" in name]
compare(my_guess, len(files), "files")
print(" -> ".join(files))

# %% [markdown]
# [An afternoon in the engine](../docs/afternoon.md) leads through fourteen of the files, each with the question that it
# answers. This chapter follows one request along the same path and stops at six of them: `engine/engine.py` and
# `engine/scheduler.py`, `workers/executor.py`, `runner/model_runner.py`, `runner/batch.py` and `sampling/sampler.py`.
# What lies below, the model and the attention, has the same two calls as in the stages,
# `model(input_ids, positions, attend)` and `model.logits(hidden)`, and knows as little as ever.
#
# ## One request, file by file
#
# Request A, alone: 54 tokens of prompt, 8 to generate, in chunks of at most 32 tokens. Everything that happens to it is
# an event:

# %%
# NBVAL_CHECK_OUTPUT
alone = run(prompts[:1], params[:1], max_num_batched_tokens=32)
for e in alone.events:
    details = {key: value for key, value in e.items() if key not in ("t", "step", "type", "request", "choice")}
    print(f"step {e['step']}  {e['type']:9}", *(f"{key}={value}" for key, value in details.items() if value != []))

# %% [markdown]
# Who said what: `added` comes from `engine/engine.py`, when the request was accepted. All the others come from
# `engine/scheduler.py`: `admitted`, `blocks` and `scheduled` while it plans a step, `token` and `finished` when it
# takes in the result.
#
# **File 1, `engine/engine.py`.** The step. The first lines of `_advance` do the work: plan, submit, commit. `step`
# makes outputs of what they bring; a server, which wants only what is new, calls `advance` in its place.

# %%
# NBVAL_CHECK_OUTPUT
source(LLMEngine.step, LLMEngine._advance)

# %% [markdown]
# **File 2, `engine/scheduler.py`.** The same rule as in stage 5: some of the gap, for some sequences, within the
# budget. A sequence *knows* tokens, and some of them are *computed*. Decodes go first, then unfinished prompts, then,
# in `_admit`, those who wait.

# %%
# NBVAL_CHECK_OUTPUT
source(Scheduler.schedule)

# %% [markdown]
# Stage 5 has this method under the same name, and most of the others: `make_room`, `admit`, `preempt`, `release`,
# `commit`, `finish`. (Here an underscore stands before those that nobody else calls.) The engine's scheduler adds seven
# things. Each leaves a name that stage 5 does not have:

# %%
# NBVAL_CHECK_OUTPUT
added = {
    "num_in_flight": "plans a step before the last one's tokens are known",
    "_claim_seat": "priorities: takes a seat, or blocks, from strictly worse priority only",
    "_free_rows": "a row on the device for each running sequence",
    "num_blocks_sent": "messages in place of objects: only what is new is sent",
    "_roll_back": "guesses: several tokens a step, and the wrong ones are forgotten",
    "keep_cached": "any end: aborts, stop strings, logits that are not finite, whose blocks nobody may find",
    "_looked_up": "bounded cost: what did not fit is not looked up again in vain",
}
here, there = inspect.getsource(scheduler), inspect.getsource(stage_5_continuous_batching)
for name, thing in added.items():
    print(f"{name:16}{thing}" if name in here and name not in there else f"{name}: not so any more")

# %% [markdown]
# Notice what it never looks at: the tokens. `schedule` reads lengths only, so it can plan step 8 while step 7 still
# runs, and nobody yet knows what step 7 will say. (`num_known` counts that token already.)
#
# What comes out is the message:

# %%
# NBVAL_CHECK_OUTPUT
source(Scheduled, StepPlan, StepResult)

# %% [markdown]
# Here are the messages for request A, both ways, as the scheduler sends and receives them. (The engine counts its steps
# from 0; the events above were renumbered for the pictures.)

# %%
# NBVAL_CHECK_OUTPUT
said = []
schedule, commit = Scheduler.schedule, Scheduler.commit
listen_down = patch.object(Scheduler, "schedule", lambda self: said.append(schedule(self)) or said[-1])
listen_up = patch.object(Scheduler, "commit", lambda self, plan, up: said.append(up) or commit(self, plan, up))
with listen_down, listen_up:
    run(prompts[:1], params[:1], max_num_batched_tokens=32)
for message in said[:8]:
    if isinstance(message, StepPlan):
        for item in message.scheduled:
            print(f"down: step {message.step}, {item}")
    else:
        print(f"  up: {message.tokens}")

# %% [markdown]
# The whole prompt went down once, when the request was added; from then on a step is a handful of numbers, however long
# the text is. The first chunk samples nothing, so nothing comes up. And no token ever goes *down*: the data plane has
# it already, it sampled it.
#
# **File 3, `workers/executor.py`**, takes the plan and promises a result. For one GPU it is a few lines; for several,
# another executor behind the same two calls sends the plan to all of them.
#
# **File 4, `runner/model_runner.py`**, keeps a *row* for each running sequence: its last token, its length, its block
# table, its sampling parameters. A plan only says what changes in a row. Then it runs the model.
#
# **File 5, `runner/batch.py`**, turns the plan into the tensors that the model sees: ids, positions, slots. You wrote
# this in stage 3, as loops over tokens; here it is array arithmetic, since a loop over 16,000 tokens takes longer than
# the GPU needs to compute them.
#
# **File 6, `sampling/sampler.py`**, draws the tokens: `argmax(logit + temperature * noise)`. The noise depends on the
# request's seed and on how many tokens it has, on nothing else: not on the batch, the row, or a preemption.
#
# On a GPU a plain decode step is replayed ([stage 6](6_cuda_graphs.ipynb)). There `graphs/decode_steps.py` takes the
# place of file 5, and file 6 is `kernels/fused/sample.py`, inside the recording: six files again.
#
# Back up: the result is committed. Only now is a block full of known tokens given its name, and only now can others
# find it:

# %%
# NBVAL_CHECK_OUTPUT
source(Scheduler.commit)

# %% [markdown]
# ## Thinking while the GPU works
#
# `async_scheduling` changes one number: how many steps may be under way while the next one is planned. Here is the
# order of the messages:

# %%
# NBVAL_CHECK_OUTPUT
for asynchronous in False, True:
    said.clear()
    with listen_down, listen_up:
        overlapped = run(prompts[2:], params[2:], async_scheduling=asynchronous)
    order = ["plan" if isinstance(message, StepPlan) else "result" for message in said[:8]]
    print(
        f"async_scheduling={asynchronous!s:5}:",
        ", ".join(order),
        "...   same tokens:",
        overlapped.outputs == whole.outputs[2:],
    )

# %% [markdown]
# With `True`, the second plan goes down before the first result comes up: the GPU always has something to do. On a CPU,
# where both planes share the cores, nothing is gained, so there the default is `False`.
#
# What can go wrong? The first result may say that the request is over (end of text, or a stop string). The step after
# it is under way already, with one token too many. That token is dropped: results are matched by the key of the
# sequence, and `commit` finds nobody of that key any more.
#
# ## Is it right?

# %%
# NBVAL_CHECK_OUTPUT
expected = hugging_face_greedy(prompts, params)
trials = {
    "as in the picture": {},
    "in chunks of 7": {"max_num_batched_tokens": 7},
    "blocks of 1": {"kvcache_block_size": 1, "num_kv_blocks": 200},
    "in six blocks": {"max_num_seqs": 3, "num_kv_blocks": 6},
    "in six blocks, async": {"max_num_seqs": 3, "num_kv_blocks": 6, "async_scheduling": True},
}
for label, config in trials.items():
    trial = run(prompts, params, **config)
    preempted = sum(e["type"] == "preempted" for e in trial.events)
    verdict = [ours == theirs for ours, theirs in zip(trial.outputs, expected, strict=True)]
    print(f"{label:21} identical to transformers: {verdict}, {preempted} preemptions")

# %% [markdown]
# ## Experiment: every transition
#
# The tightest of these runs as a log of states. The three arrows of notebook 5 are all there is, in this engine too:

# %%
# NBVAL_CHECK_OUTPUT
TRANSITIONS = {
    "added": "         -> WAITING ",
    "admitted": "WAITING  -> RUNNING ",
    "preempted": "RUNNING  -> WAITING ",
    "finished": "RUNNING  -> FINISHED",
}
tight = run(prompts, params, max_num_seqs=3, num_kv_blocks=6)
for e in tight.events:
    if e["type"] in TRANSITIONS:
        print(f"step {e['step']:2d}  request {NAMES[e['request']]}  {TRANSITIONS[e['type']]}")

# %%
swimlane(tight.events, names=NAMES, title="Three requests in six blocks")

# %% [markdown]
# B waits for one step, as A has taken four of the six blocks, and so it finds A's beginning in the cache: the tight
# pool is kinder to it than the roomy one. In step 14, B needs a block more, and C has to give up its own.
#
# New is *who* must go. In stage 5 it was the latest arrival. Here a request may have a `priority` (the smaller number
# goes first), and the last one in the order of (priority, arrival) gives way. C arrives last; let it be urgent:

# %%
# NBVAL_CHECK_OUTPUT
with LLM(STORY_MODEL, on_event=(events := []).append, **SMALL | {"max_num_seqs": 1}) as llm:
    llm.generate(prompts, params, use_tqdm=False, priority=[1, 1, 0])
print("order of admission:", [NAMES[e["request"]] for e in as_drawn(events) if e["type"] == "admitted"])

# %% [markdown]
# ## Experiment: the budget
#
# Sixteen requests about Lotte, every fourth with a long prompt. **Guess:** with a budget of 16 tokens a step the engine
# needs how many times as many steps as with one of 512?

# %%
my_guess = None  # times as many

# %%
# NBVAL_CHECK_OUTPUT
shapes = [(16, 8), (20, 4), (12, 12), (90, 24)] * 4
text = tokenizer.encode("\n\n".join([LOTTE, *(r for r in map(tokenizer.decode, prompts))])).ids
sixteen = [text[5 * i : 5 * i + n] for i, (n, _) in enumerate(shapes)]
sixteen_params = [SamplingParams(temperature=0, max_tokens=m, ignore_eos=True) for _, m in shapes]
wide = {"max_num_seqs": 8, "num_kv_blocks": 100}
budgets = (16, 64, 512)
sweep = {b: run(sixteen, sixteen_params, max_num_batched_tokens=b, **wide) for b in budgets}
steps = {b: max(e["step"] for e in sweep[b].events) for b in budgets}
compare(my_guess, steps[16] / steps[512], "times as many")
for b in budgets:
    work = sum(e["tokens"] for e in sweep[b].events if e["type"] == "scheduled")
    same = sweep[b].outputs == sweep[512].outputs
    print(f"budget {b:3d}: {steps[b]:3d} steps of {work / steps[b]:4.1f} tokens, same outputs: {same}")

# %%
seconds = {b: sweep[b].events[-1]["t"] - sweep[b].events[0]["t"] for b in budgets}
bars(
    {"nanovllm": [sum(m for _, m in shapes) / seconds[b] for b in budgets]},
    budgets,
    xlabel="max_num_batched_tokens",
    ylabel="throughput [tokens/s]",
    title="What a larger budget brings",
)

# %% [markdown]
# ## Experiment: the switches
#
# Prefix cache, chunked prefill and asynchronous scheduling, each taken away alone. The same sixteen requests, twice in
# a row on one engine, so that the second round can find what the first one left:

# %%
# NBVAL_CHECK_OUTPUT
switches = {
    "everything on": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "no chunks": {"enable_chunked_prefill": False, "max_num_batched_tokens": 96},
    "synchronous": {"async_scheduling": False},
}
usual = {"async_scheduling": True, "max_num_batched_tokens": 64} | wide
switched = {label: run(sixteen * 2, sixteen_params * 2, **usual | off) for label, off in switches.items()}
for label, result_of in switched.items():
    work = [(e["step"], e["tokens"]) for e in result_of.events if e["type"] == "scheduled"]
    computed, count = sum(n for _, n in work), max(step for step, _ in work)
    largest = max(sum(n for step, n in work if step == s) for s in range(1, count + 1))
    cached = sum(e["cached"] for e in result_of.events if e["type"] == "admitted")
    same = result_of.outputs == switched["everything on"].outputs
    print(
        f"{label:15}: {computed:4d} tokens computed in {count} steps of at most {largest}, {cached:3d} found cached,",
        same,
    )

# %% [markdown]
# (The asynchronous runs take two steps more: a seat is given away when the end of its owner is committed, and that is
# one step later now.)
#
# The switches change how much is computed and when, and never what comes out. This is the promise of the whole package,
# and the tests hold it to that: thousands of random histories without a model, in which every single slot that is read
# is checked (`tests/engine/shadow.py`), and every combination of switches with one.
#
# ## The cost of thinking
#
# A scheduler that walks through ten thousand waiting requests in every step would eat up the millisecond that it is
# meant to hide. So nothing in it depends on how many wait. Waiting is a heap, freed blocks are an ordered dictionary,
# and a sequence that was hashed once keeps its digests for life:

# %%
# NBVAL_CHECK_OUTPUT
source(BlockManager.find_prefix)

# %% [markdown]
# `tests/engine/test_scheduler_cost.py` measures it with 512 running and 10,000 waiting.
#
# ## Your turn
#
# There is no `make stage-8-exercise`. Three ways to make the engine your own instead:
#
# - **Break it.** `tests/engine/faults.py` lists some thirty plausible mistakes, each a small edit. Make one of them by
#   hand, say what you expect to go wrong, and run `pytest tests/engine/test_shadow_kv.py`.
# - **Ask it.** `nanovllm info` says what was chosen on your machine and why; `nanovllm bench` how fast that is.
# - **Extend it.** A policy that lets short prompts overtake long ones is a change of one line in `_order`
#   (`engine/scheduler.py`). What does it do to the promise that within a priority nothing waits for ever?
#
# **To think about.** (a) Why may a block be found by its hash only after the commit, and not as soon as its step was
# submitted? (b) A preempted sequence gives its blocks back at once, although a step that writes to them is still under
# way. Why does that harm nobody? (c) The data plane samples a token and tells the control plane. If the wire between
# them were slow, a network, say, what would you send less of?
#
# ## Further reading
#
# - Kwon et al., [PagedAttention](https://arxiv.org/abs/2309.06180), 2023, and Yu et al.,
#   [Orca](https://www.usenix.org/conference/osdi22/presentation/yu), 2022: the two ideas under all of this.
# - Srivatsa et al., [Can Scheduling Overhead Dominate LLM Inference
#   Performance?](https://mlsys.wuklab.io/posts/scheduling_overhead/), 2024: what a thinking host costs.
# - In vLLM: `vllm/v1/engine/core.py` (the step, and its variant with a queue of batches under way),
#   `vllm/v1/core/sched/scheduler.py` and `async_scheduler.py`, `vllm/v1/core/kv_cache_manager.py`,
#   `vllm/v1/worker/gpu_model_runner.py`. You will know your way around: the names here are the same where the things
#   are.
