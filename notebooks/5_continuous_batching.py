# %% [markdown]
# # 5. Continuous batching: the bus that stops everywhere
#
# Until now a batch was a coach trip: everybody gets on at the start, nobody gets on later, and the coach is not free
# again until the last passenger has arrived. Whoever got off early leaves an empty seat, and whoever comes late waits
# for the next trip.
#
# This notebook turns the coach into a city bus. At *every step* the engine decides anew who takes part, and with how
# many tokens. That is **continuous batching**, the idea that made inference servers several times faster at once, and
# it needs no new mathematics at all: a loop, two queues and a budget.
#
# Beside this notebook open `stages/stage_5_continuous_batching.py`; it holds the solutions of the exercises, so close
# it while you write your own. `make stage-5-diff` shows what changed, solutions as well.
#
# **About 30 minutes, and 40 minutes for the exercises.** You need notebooks 3 and 4.

# %%
import json
from unittest.mock import patch

from stages.core import SamplingParams
from stages.stage_4_prefix_caching import PrefixCachingEngine, PrefixCachingPool
from stages.stage_5_continuous_batching import ContinuousBatchingEngine, Scheduled, Scheduler
from tools.pictures.blocks import lanes_and_blocks
from tools.pictures.plots import bars
from tools.pictures.steps import seats, swimlane, swimlanes
from tools.pictures.three_requests import (
    BLOCK_SIZE,
    LOTTE,
    NAMES,
    NUM_BLOCKS,
    ROOT,
    SEATS,
    compare,
    hugging_face_greedy,
    list_exercises,
    load_tokenizer,
    record,
    source,
    three_requests,
)

tokenizer = load_tokenizer()
prompts, params = three_requests()

# %% [markdown]
# ## The three requests

# %%
run = record(ContinuousBatchingEngine, max_num_seqs=SEATS, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
swimlane(run.events, names=NAMES, title="Stage 5: who runs when")

# %% [markdown]
# This is the picture that notebook 0 called the goal. A is over after step 8, and in step 9 C sits in its seat: its six
# prompt tokens and B's single new one share a step. Prefill and decode are no longer two phases of an engine.
#
# Something is lost, too: A and B start in the same step, so B computes all of its 53 tokens, though A has 48 of them.
# In that step they are not in the cache *yet*. With a thousand requests, rather than two, this hardly matters.
#
# ## What hurt
#
# Twelve requests of different lengths, four seats. In the static batches of stage 4:

# %%
stories = json.loads((ROOT / "tests" / "data" / "story_prompts.json").read_text(encoding="utf-8"))["prompts"]
lengths = [
    (20, 6), (12, 30), (16, 10), (24, 4), (10, 18), (18, 36), (14, 8), (22, 12), (16, 24), (12, 6), (20, 16), (14, 10),
]  # prompt tokens, tokens to generate  # fmt: skip
twelve = [tokenizer.encode(text).ids[:n] for text, (n, _) in zip(stories, lengths, strict=False)]
twelve_params = [SamplingParams(temperature=0, max_tokens=m, ignore_eos=True) for _, m in lengths]

static = record(PrefixCachingEngine, twelve, twelve_params, max_num_seqs=4)
seats({"static (stage 4)": static.events}, 4)

# %% [markdown]
# More seats are empty than taken. In each batch of four, one request is long, and three seats wait for it.
#
# ## Guess first
#
# The twelve want 180 tokens together, one seat yields one token a step, and there are four seats. Stage 4 needs 99
# steps. **Guess:** how many does an engine need that fills an empty seat at once?

# %%
my_guess = None  # steps

# %%
# NBVAL_CHECK_OUTPUT
continuous = record(ContinuousBatchingEngine, twelve, twelve_params, max_num_seqs=4)
print("same tokens:", static.outputs == continuous.outputs)
compare(my_guess, max(e["step"] for e in continuous.events), "steps")

# %%
seats({"static (stage 4)": static.events, "continuous (stage 5)": continuous.events}, 4)

# %% [markdown]
# 45 would be the least that is possible. (To be fair to stage 4: nine of its 99 steps are due to its habit of
# prefilling one prompt at a time, so that later ones can find the earlier ones in the cache.)
#
# ## The idea: one rule
#
# Each sequence has tokens that it *knows* (its prompt, and what it has generated) and tokens that are *computed* (their
# keys and values lie in the cache). The rule: **a step computes some of the gap, for some sequences, within a budget of
# tokens.** If the gap is closed, the logits of the last token give the next one, and the gap is 1 again.
#
# | what people call it | the gap |
# |---|---|
# | decode | 1 |
# | prefill | the whole prompt |
# | a prefix cache hit | the prompt, less what was found |
# | chunked prefill | more than the budget allows: a part now, the rest later |
# | coming back after preemption | the prompt and all that was generated, as nothing is computed any more |
#
# All five are the same line of code. A sequence is in one of three states:
#
# ```
#            admitted                finished
#  WAITING ------------>  RUNNING ------------>  FINISHED
#     ^                      |
#     +----------------------+
#             preempted
# ```
#
# ## When memory runs out: preemption
#
# Stages 3 and 4 reserved the blocks of the whole output beforehand, so that nobody could ever run dry. Stage 5 takes a
# block when it is needed. More sequences fit, and sometimes one too many: somebody needs a block, and none is free.
# Then the latest arrival gives *all* its blocks back and waits again (**preemption**). Its tokens are kept; only keys
# and values are lost, and they can be computed again.
#
# Six of the requests, in a pool of 4 blocks, as many as the longest of them needs for itself:

# %%
tight = record(ContinuousBatchingEngine, twelve[:6], twelve_params[:6], max_num_seqs=4, num_blocks=4)
lanes_and_blocks(tight.events, 4, title="A pool of four blocks")

# %%
# NBVAL_CHECK_OUTPUT
print("same tokens as with plenty of memory:", tight.outputs == continuous.outputs[:6])

# %% [markdown]
# Request 2 was thrown out after its first step, as request 1 needed a second block, and came back as soon as request 0
# was over. Request 4 lost seven steps of work, or would have: it finds its first block in the prefix cache, since
# nobody had needed it in the meantime.
#
# Why can this not go on for ever, two sequences throwing each other out? Because the order is fixed: an earlier arrival
# takes blocks from later ones, and nobody can take its own. So the first always advances, and in the end everyone is
# first.
#
# ### Every transition
#
# Here is the same run as a log of states, told by the events. Compare it with the picture:

# %%
# NBVAL_CHECK_OUTPUT
TRANSITIONS = {
    "added": "         -> WAITING ",
    "admitted": "WAITING  -> RUNNING ",
    "preempted": "RUNNING  -> WAITING ",
    "finished": "RUNNING  -> FINISHED",
}
waiting = running = 0
for event in tight.events:
    kind = event["type"]
    if kind in TRANSITIONS:
        waiting += {"added": 1, "admitted": -1, "preempted": 1, "finished": 0}[kind]
        running += {"added": 0, "admitted": 1, "preempted": -1, "finished": -1}[kind]
        print(
            f"step {event['step']:2d}  request {event['request']}  {TRANSITIONS[kind]}",
            f" {waiting} waiting, {running} running",
        )

# %% [markdown]
# ## The code
#
# A share of a step, and the question whether it closes the gap:

# %%
# NBVAL_CHECK_OUTPUT
source(Scheduled)

# %% [markdown]
# The heart of the engine. First the running ones, in order of arrival, then, if anything of the budget is left, the
# waiting ones. Find the five cases of the table in it, and notice that none of them has a name here:

# %%
# NBVAL_CHECK_OUTPUT
source(Scheduler.schedule, Scheduler.make_room, Scheduler.admit)

# %%
# NBVAL_CHECK_OUTPUT
source(Scheduler.preempt)

# %% [markdown]
# And a step: schedule, run the model and sample where the gap was closed, commit what came of it.

# %%
# NBVAL_CHECK_OUTPUT
source(ContinuousBatchingEngine.step, ContinuousBatchingEngine.run, Scheduler.commit)

# %% [markdown]
# `run` lays tokens end to end with stage 3's `make_batch`. It never cared whose tokens they were or how many each had,
# and so it needed no change.
#
# ## Is it right?
#
# A request must not notice with whom it shares its steps, or in how many pieces it was computed. So: with room for all,
# in chunks of 7 tokens, and in a pool where A and B fit only one at a time.

# %%
# NBVAL_CHECK_OUTPUT
expected = hugging_face_greedy(prompts, params)
trials = {
    "with room for all": {"max_num_seqs": 3},
    "in chunks of 7": {"max_num_seqs": 3, "max_num_batched_tokens": 7},
    "in five blocks": {"max_num_seqs": 3, "num_blocks": 5},
}
for label, options in trials.items():
    trial = record(ContinuousBatchingEngine, **options)
    preempted = sum(e["type"] == "preempted" for e in trial.events)
    verdict = [ours == theirs for ours, theirs in zip(trial.outputs, expected, strict=True)]
    print(f"{label:18} identical to transformers: {verdict}, {preempted} preemptions")

# %% [markdown]
# ## Is it fast?
#
# Steps are not seconds. The twelve requests again, in tokens a second:

# %%
speed = {}
for label, events in {"static (stage 4)": static.events, "continuous (stage 5)": continuous.events}.items():
    speed[label] = sum(m for _, m in lengths) / (events[-1]["t"] - events[0]["t"])
    print(f"{label:21} {speed[label]:5.0f} tokens/s")

# %% [markdown]
# ### Experiment: the budget
#
# `max_num_batched_tokens` is how many tokens a step may compute at most. Large steps make better use of the machine:
# the weights are read once, however many tokens there are. Sixteen requests, every fourth with a prompt of 96 tokens.
# **Guess:** how many times as many tokens a second with a budget of 128 as with one of 8?

# %%
my_guess = None  # times as many

# %%
shapes = [(16, 8), (20, 4), (12, 12), (96, 32)] * 4
texts = ["\n\n".join(stories[i : i + 3]) for i in range(len(shapes))]
mixed = [tokenizer.encode(text).ids[:n] for text, (n, _) in zip(texts, shapes, strict=True)]
mixed_params = [SamplingParams(temperature=0, max_tokens=m, ignore_eos=True) for _, m in shapes]

budgets = [8, 32, 128, 512]
rates, sweep = dict.fromkeys(budgets, 0.0), {}
for budget in budgets * 2:  # the better of two rounds, as a busy moment of the machine makes a run slower, never faster
    sweep[budget] = record(ContinuousBatchingEngine, mixed, mixed_params, max_num_batched_tokens=budget)
    events = sweep[budget].events
    rates[budget] = max(rates[budget], sum(m for _, m in shapes) / (events[-1]["t"] - events[0]["t"]))
compare(my_guess, rates[128] / rates[8], "times as many")
bars(
    {"stage 5": list(rates.values())},
    budgets,
    xlabel="max_num_batched_tokens",
    ylabel="throughput [tokens/s]",
    title="What a larger budget brings",
)

# %%
# NBVAL_CHECK_OUTPUT
for budget, result in sweep.items():
    work = [e["tokens"] for e in result.events if e["type"] == "scheduled"]
    steps_needed = max(e["step"] for e in result.events)
    same = result.outputs == sweep[512].outputs
    print(
        f"budget {budget:3d}: {steps_needed:3d} steps of {sum(work) / steps_needed:4.1f} tokens, same outputs: {same}"
    )

# %% [markdown]
# More at first, then hardly anything: once there are enough tokens in a step, the arithmetic is the bottleneck, or
# there is simply no more work to fill the step with. With a budget of 8 there is another problem: sixteen have a seat,
# and half of them nothing to do.
#
# So why not always the largest budget? Request 0 is in the middle of its answer when request 2 arrives with a prompt of
# 300 tokens. Each step is drawn as wide as the tokens it computes, which is roughly the time it takes. First with a
# budget of 512:

# %%
long_prompt = tokenizer.encode("\n\n".join(stories[8:16])).ids[:300]
meeting = [mixed[0], mixed[1], long_prompt]
meeting_params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (24, 4, 4)]
in_one_piece = record(ContinuousBatchingEngine, meeting, meeting_params, max_num_seqs=2, max_num_batched_tokens=512)
in_chunks = record(ContinuousBatchingEngine, meeting, meeting_params, max_num_seqs=2, max_num_batched_tokens=32)
swimlane(in_one_piece.events, by="tokens", title="Budget 512: the long prompt in one piece")

# %% [markdown]
# The wide box of request 0 is *one* token, for which it waits as long as 300 tokens of somebody else take. A reader
# sees the text stop. Now with a budget of 32 below it:

# %%
swimlanes({"budget 512": in_one_piece.events, "budget 32": in_chunks.events}, "A long prompt beside another request")

# %%
# NBVAL_CHECK_OUTPUT
for budget, result in {512: in_one_piece, 32: in_chunks}.items():
    answering = {e["step"] for e in result.events if e["type"] == "token" and e["request"] == 0}
    work = [(e["step"], e["tokens"]) for e in result.events if e["type"] == "scheduled"]
    largest = max(sum(n for step, n in work if step == s) for s in answering - {1})
    arrived, first = (
        next(e["step"] for e in result.events if e["type"] == kind and e["request"] == 2)
        for kind in ("admitted", "token")
    )
    waited = "1 step" if first == arrived else f"{first - arrived + 1} steps"
    print(f"budget {budget:3d}: request 0 waits for at most {largest} tokens, request 2 for {waited}")
print("same tokens:", in_one_piece.outputs == in_chunks.outputs)

# %% [markdown]
# That is **chunked prefill**: everybody goes on, a little slower, and the newcomer pays for it with a few more steps.
# The budget is the knob between throughput and an even flow of text.

# %% [markdown]
# ### Experiment: the cache off
#
# Eight requests about Lotte, two seats, first with the prefix cache, then without: blocks never get a name, as in
# notebook 4.

# %%
# NBVAL_CHECK_OUTPUT
lotte = [tokenizer.encode(f"{LOTTE}\n\n{text}").ids[:72] for text in stories[:8]]
eight = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
with_cache = record(ContinuousBatchingEngine, lotte, eight, max_num_seqs=2)
with patch.object(PrefixCachingPool, "publish", lambda pool, seq: None):
    without = record(ContinuousBatchingEngine, lotte, eight, max_num_seqs=2)
for label, result in {"cache on": with_cache, "cache off": without}.items():
    computed = sum(e["tokens"] for e in result.events if e["type"] == "scheduled")
    found = [e["cached"] for e in result.events if e["type"] == "admitted"]
    print(f"{label:9}: {computed} tokens computed, found in the cache: {found}")
print("same tokens:", with_cache.outputs == without.outputs)

# %% [markdown]
# The first two start together and find nothing, all others find Lotte. Preemption needs the cache as well: without it,
# request 4 of the tight pool would have computed everything again.
#
# ## What still hurts
#
# On this CPU, not much: you have built what a serving engine does. On a GPU the step is now so small that Python takes
# longer to *launch* its kernels than the GPU takes to run them; stage 6 records the launches once and replays them. And
# a model that does not fit on one GPU has to be split; that is stage 7.
#
# ## Your turn
#
# ```
# make stage-5-exercise                 # writes exercises/stage_5_continuous_batching.py
# make stage-5-test IMPL=exercises      # tells you how you did
# ```

# %%
# NBVAL_CHECK_OUTPUT
list_exercises(5)

# %% [markdown]
# <details><summary>If you are stuck</summary>
#
# - **blocks for the running**: a loop, since one victim may not be enough; and the victim may be the requester itself.
#   Then it is no longer running, and must not compute.
# - **admitting**: the order of the waiting is sacred. If the first does not fit, do not look at the second: it would
#   always find a gap, and the first would starve.
# - **preempting**: three places must agree about who the sequence is now: the queues, the pool, and the sequence
#   itself.
#
# </details>
#
# The tests run hundreds of requests through pools that are much too small, and compare every token with Hugging Face's.
# `make stage-5-mutants` shows what the mistakes look like.
#
# **To think about.** (a) A preempted sequence comes back with 30 tokens of its own output. Why are they not sampled
# again? (b) Preemption throws work away. The other way is to copy blocks to CPU memory and back ("swapping"). When is
# computing again the better one? (c) With a budget of 8, who gets tokens first: the running or the waiting? What would
# happen to the time to first token the other way round, and what to the time between tokens?
#
# ## Further reading
#
# - Yu et al., [Orca: A Distributed Serving System for Transformer-Based Generative
#   Models](https://www.usenix.org/conference/osdi22/presentation/yu), 2022: scheduling at every iteration.
# - Agrawal et al., [Taming Throughput-Latency Tradeoff in LLM Inference with
#   Sarathi-Serve](https://arxiv.org/abs/2403.02310), 2024: chunked prefill, and the two pictures above, in earnest.
# - Kwon et al., [PagedAttention](https://arxiv.org/abs/2309.06180), 2023, section 4.5: preemption, by swapping and by
#   computing again.
# - In vLLM: `vllm/v1/core/sched/scheduler.py`, `Scheduler.schedule`. Its first comment says that there is no "decoding
#   phase" nor "prefill phase" in the scheduler, and you know now what it means.
#
# **You have made it.** The five files in `stages/` are a complete engine. The package `nanovllm` is the same idea
# again, built for speed: `nanovllm/engine/scheduler.py` should look familiar.
