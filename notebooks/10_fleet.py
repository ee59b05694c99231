# %% [markdown]
# # 10. From one engine to a fleet
#
# A service has more requests than one GPU can answer. So there are several replicas of the engine, with a router before
# them, and new questions. Why do a few requests wait for seconds when most wait for milliseconds? Where should the next
# message of a conversation go? What happens when a replica dies?
#
# Nobody rents a hundred GPUs for a chapter. But the engine's control plane knows no tensors: it plans a step, hands the
# plan to an executor, and takes in tokens. So replace the executor by one that computes nothing and only says how long
# the step *would* have taken. Everything else stays: the scheduler that you have read runs here, unchanged, and minutes
# of a fleet take seconds.
#
# **About 40 minutes.** You need notebook 8. No GPU is needed. This chapter has no exercises that are tested: it ends
# with three questions that you can settle by simulation.

# %%
from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.simulate.arrivals import Lengths
from nanovllm.simulate.costs import StepShape, load_costs
from nanovllm.simulate.fleet import FleetOptions
from nanovllm.simulate.replica import SimulatedExecutor, VirtualClock
from nanovllm.simulate.routers import PowerOfTwoChoices
from nanovllm.simulate.scenario import Scenario, WorkloadOptions
from tools.pictures.plots import bars, lines
from tools.pictures.steps import swimlane
from tools.pictures.three_requests import (
    BLOCK_SIZE,
    NAMES,
    NUM_BLOCKS,
    ROOT,
    SEATS,
    STORY_MODEL,
    compare,
    hugging_face_greedy,
    source,
    three_requests,
)

prompts, stage_params = three_requests()
params = [SamplingParams(temperature=0, max_tokens=p.max_tokens) for p in stage_params]
SMALL = {"max_num_seqs": SEATS, "kvcache_block_size": BLOCK_SIZE, "num_kv_blocks": NUM_BLOCKS, "max_model_len": 1024}
MODEL = str(ROOT / "benchmarks" / "shapes" / "Qwen3-8B")  # a config.json is all that is needed

# %% [markdown]
# ## The three requests, without a model
#
# First with the model, as ever. Then by the same engine with `SimulatedExecutor` in place of the model:

# %%
with LLM(STORY_MODEL, device="cpu", on_event=(real := []).append, **SMALL) as llm:
    outputs = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

clock = VirtualClock()
executor = SimulatedExecutor(load_costs("h200", MODEL), clock, host_token=0, acceptance=0, draw=None)
config = EngineConfig(**SMALL).resolve(on_gpu=False, model_max_len=1024)
engine = LLMEngine(executor, config, vocab_size=4096, on_event=(simulated := []).append, clock=clock)
for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
    engine.add_request(str(i), prompt, p)
while engine.has_unfinished():
    engine.step()


# %%
def as_drawn(events):  # the pictures number requests and count steps from 1
    return [e | {"request": int(e["request"]), "step": e["step"] + (e["type"] != "added")} for e in events]


swimlane(as_drawn(simulated), names=NAMES, title="Scheduled for real, computed by nobody: who runs when")


# %%
# NBVAL_CHECK_OUTPUT
def decisions(events):  # all but the time, and the tokens themselves
    return [{k: v for k, v in e.items() if k not in ("t", "ids")} for e in events]


print("with the model, identical to transformers:", outputs == hugging_face_greedy(prompts, params))
print("without it, the same decisions:", decisions(real) == decisions(simulated))
print(f"on this card it would have taken {1e3 * clock():.0f} ms")

# %% [markdown]
# The scheduler does not know that there is no model, and nothing in `engine/` was changed for this but one thing: the
# clock is a parameter.
#
# ## What a step costs
#
# So everything depends on how long a step takes. For this card, the times of steps were measured with a model of 0.6
# billion parameters. For other models, such as that of 8 billion in this chapter, they are derived from bytes and
# operations.

# %%
costs = load_costs("h200", MODEL)
print(costs.source)
batches = (1, 8, 16, 32, 64, 96, 128, 192, 256)


def decode_ms(batch, context):
    shape = StepShape(decodes=batch, decode_keys=batch * context, samples=batch)
    return 1e3 * costs.device_seconds(shape)


def prompt_ms(tokens):
    pairs = tokens * (tokens + 1) // 2  # of a query and a key
    return 1e3 * costs.device_seconds(StepShape(0, 0, 1, tokens, pairs, samples=1, prompt_keys=tokens))


lines(
    {f"contexts of {n:,}": (batches, [decode_ms(b, n) for b in batches]) for n in (500, 2000, 8000)},
    xlabel="sequences that decode",
    ylabel="time of a step [ms]",
    title="A step of decodes",
    markers=True,
)

# %% [markdown]
# The curves begin at the time that the weights take to be read. To serve two sequences costs hardly more than to serve
# one. A prompt is another matter: its tokens are arithmetic, and each has its price.

# %%
# NBVAL_CHECK_OUTPUT
for tokens in (1, 512, 4096, 16384):
    print(f"a prompt of {tokens:6,} tokens: {prompt_ms(tokens):4.0f} ms")

# %% [markdown]
# ## Why the slowest request waits for others, not for the GPU
#
# One replica. Requests come at random, independently of each other, with about 700 tokens of prompt and 180 of answer
# on average. `run` simulates a minute of that.


# %%
def run(rate, replicas=1, seconds=60, router="two-choices", engine=None, fleet=None, **clients):
    statistics = Scenario(
        model=MODEL,
        card="h200",
        engine=EngineConfig(**engine or {}),
        workload=WorkloadOptions(rate=rate, seconds=seconds, **clients),
        fleet=FleetOptions(replicas=replicas, **fleet or {}),
        router=router,
    ).run()
    return statistics, statistics.report()


# %% [markdown]
# At 5 requests per second half of all have their first token after 26 ms. **Guess:** at 50 per second, ten times as
# many, what is that time? And what is it for the slowest request of a hundred?

# %%
my_guess = None  # ms to the first token at 50 per second, the slowest of a hundred

# %%
# NBVAL_CHECK_OUTPUT
rates, first, gap = (5, 20, 35, 44, 47, 50), {}, {}
print("requests/s   first token [ms]: half, 99 of 100   between tokens [ms]: half, 99 of 100   finished/s")
for rate in rates:
    _, report = run(rate)
    first[rate], gap[rate] = report["first_token_seconds"], report["gap_seconds"]
    figures = [1e3 * value for value in (first[rate]["p50"], first[rate]["p99"], gap[rate]["p50"], gap[rate]["p99"])]
    print("{:10} {:22.0f} {:10.0f} {:31.0f} {:10.0f}".format(rate, *figures), end="")
    print(f"{report['queries_per_second']:17.1f}")
compare(my_guess, 1e3 * first[50]["p99"], "ms")

# %%
lines(
    {
        "half of all": (rates, [1e3 * first[r]["p50"] for r in rates]),
        "99 of 100": (rates, [1e3 * first[r]["p99"] for r in rates]),
    },
    xlabel="requests per second",
    ylabel="time to the first token [ms]",
    title="One replica under load",
    markers=True,
)

# %% [markdown]
# Up to three quarters of what the replica can do, everything is calm. Then the curve turns up like a wall. The GPU has
# not become slower there: it finishes more requests per second than ever. What grows is the *queue*. Arrivals are
# uneven, and a replica with little room to spare cannot catch up before the next burst comes. Queueing theory has a
# formula for the simplest case (Pollaczek and Khinchine, 1930): with a load of $r$ the mean wait grows as
# $r / (1 - r)$. From 50% to 90% load, that is nine times as much. Behind the wall more arrive than can be
# answered, and the wait has no end but that of our minute.
#
# A batching engine bends this curve: the longer the queue, the more sequences a step serves. So it holds out far longer
# than one that serves one request at a time, and then turns up all the more steeply. And it pays before that, in the
# other currency: the time *between* tokens grows with the batch.
#
# So a target for the slowest of a hundred says how much of a GPU may be used at all. Buy for the wall and not for the
# average.
#
# ## Chunks: whose time is it?
#
# While a long prompt is computed, all running answers stand still. Chunked prefill cuts prompts so that no step
# computes more than `max_num_batched_tokens`. Small chunks are kind to those who read. **Guess:** which budget keeps
# the slowest of a hundred gaps under 50 ms, and what does it do to the first token?

# %%
my_guess = None  # tokens of a step's budget

# %%
# NBVAL_CHECK_OUTPUT
budgets = (512, 1024, 2048, 4096, 8192, 16384)
long_prompts = {"prompt_tokens": Lengths("lognormal", 1000.0, 1.2)}
chunks = {}
print("budget   between tokens [ms]: 99 of 100, longest   first token [ms]: half, 99 of 100")
for budget in budgets:
    _, report = run(20, engine={"max_num_batched_tokens": budget}, **long_prompts)
    gaps, waits = report["gap_seconds"], report["first_token_seconds"]
    chunks[budget] = [1e3 * value for value in (gaps["p99"], gaps["largest"], waits["p50"], waits["p99"])]
    print("{:6} {:31.0f} {:10.0f} {:23.0f} {:11.0f}".format(budget, *chunks[budget]))
compare(my_guess, max(budget for budget in budgets if chunks[budget][0] < 50), "tokens")

# %%
bars(
    {"between tokens": [chunks[b][0] for b in budgets], "first token": [chunks[b][3] for b in budgets]},
    budgets,
    xlabel="max_num_batched_tokens",
    ylabel="99 of 100 wait at most [ms]",
    title="A budget moves the wait from one to the other",
)

# %% [markdown]
# Who reads wants a small budget. Who waits for the first token wants a larger one: each chunk reads all weights again,
# so with small chunks the replica reaches its wall earlier. Here the first token comes no earlier with more than 2,048
# tokens. The largest budgets hardly differ, since hardly any prompt is longer.
#
# ## Where does the next message go?
#
# Four replicas, and conversations: each message carries all that was said before. The replica that answered the last
# message has all of this in its prefix cache. Three routers:

# %%
# NBVAL_CHECK_OUTPUT
source(PowerOfTwoChoices)

# %% [markdown]
# - `two-choices` balances. It knows nothing of what a replica has in its cache.
# - `sessions` (`ConsistentHash`) sends a conversation to one replica always, and does not look at load at all.
# - `prefix` (`PrefixAffinity`) remembers which beginnings it has sent where, and follows them.
#
# **Guess:** by what factor does following the conversation shorten the first token, half of all?

# %%
my_guess = None  # times as fast

# %%
# NBVAL_CHECK_OUTPUT
talk = {"turns": 8.0, "think_seconds": 3.0, "prompt_tokens": Lengths("lognormal", 800.0, 0.5)}
talks = {}
print("router        cached   first token [ms]: half, 99 of 100   queries by replica")
for router in ("two-choices", "sessions", "prefix"):
    _, report = run(80, replicas=4, seconds=40, router=router, **talk)
    waits = talks[router] = report["first_token_seconds"]
    print(f"{router:12} {report['tokens']['cached_share']:7.0%}", end="")
    print(f"{1e3 * waits['p50']:25.0f} {1e3 * waits['p99']:11.0f}   {report['replicas']['queries']}")
compare(my_guess, talks["two-choices"]["p50"] / talks["prefix"]["p50"], "times as fast")

# %% [markdown]
# Now another service: single questions, which all begin with the same system prompt of 2,000 tokens. Everything that
# is shared is shared by all. Which router would you choose now?

# %%
# NBVAL_CHECK_OUTPUT
same = {"shared_prefix": 2000, "prompt_tokens": Lengths("lognormal", 200.0, 0.8)}
print("router        cached   first token [ms]: half, 99 of 100   queries by replica")
for router, kwargs in (("two-choices", {}), ("prefix", {}), ("prefix", {"imbalanced_threshold": 8})):
    scenario = Scenario(
        model=MODEL,
        card="h200",
        engine=EngineConfig(),
        workload=WorkloadOptions(rate=60, seconds=30, **same),
        fleet=FleetOptions(replicas=4),
        router=router,
        router_kwargs=kwargs,
    )
    report = scenario.run().report()
    waits = report["first_token_seconds"]
    print(f"{router:12} {report['tokens']['cached_share']:7.0%}", end="")
    print(f"{1e3 * waits['p50']:25.0f} {1e3 * waits['p99']:11.0f}   {report['replicas']['queries']} {kwargs or ''}")

# %% [markdown]
# The first replica got the first question, so it has the beginning, so it gets the next one, and all others. The other
# three stay idle. Each of them could have had the same beginning in its cache after a single question. Affinity needs a
# limit: with `imbalanced_threshold` a replica that is ahead by more than so many queries is left alone for a while. Ray
# Serve's router has the same parameter, and without it the same fault.
#
# To watch this request by request, with the reason of each decision, see the second floor of
# [be the scheduler](../docs/be_the_scheduler.md), a page that `make scheduler` writes.
#
# ## A replica dies
#
# Four replicas, at 70% of what they can do. After 10 s one of them dies, and a new one is ready 10 seconds later. What
# the dead one had begun is lost, and sent again by its clients.


# %%
# NBVAL_CHECK_OUTPUT
WALL = 42  # requests per second: a little less than the most that a replica finished above
death = {"deaths": ((10.0, 0),), "startup_seconds": 10.0}


def unanswered(load):  # requests without a whole answer, over time
    line = run(round(4 * WALL * load), replicas=4, seconds=60, fleet=death)[0].timeline
    return [i * line.width for i in range(len(line.bins))], [b.most_open for b in line.bins]


curves = {"at 70%": unanswered(0.70)}
print(f"before: {max(curves['at 70%'][1][:10])} requests at most wait for the rest of their answer")
print(f"after:  {max(curves['at 70%'][1])}")

# %% [markdown]
# **Guess:** how many requests will wait at the worst moment if the fleet runs at 95%?

# %%
my_guess = None  # requests

# %%
curves["at 95%"] = unanswered(0.95)
compare(my_guess, max(curves["at 95%"][1]), "requests")
lines(
    curves,
    xlabel="time [s]",
    ylabel="requests without a whole answer",
    title="One of four replicas dies at 10 s, and another one is there at 20 s",
)

# %% [markdown]
# At 70% three replicas can just carry what four had carried, and the fleet recovers as soon as the fourth is back. At
# 95% the three fall behind for 10 seconds, and after that only the small rest of 5% is left to catch up with: it takes
# minutes. This is why fleets are run with room to spare. The room is not for the average day.
#
# ## How many GPUs?
#
# All this can be asked from the command line: `nanovllm simulate` runs one fleet, and `nanovllm plan` searches the
# smallest one that meets a target. [docs/fleet.md](../docs/fleet.md) has their options, and what the
# simulation does not know. `examples/ray_serve.py` runs what you have chosen on real machines.
#
# ## How far can you trust it?
#
# A simulation is as good as its costs. The decisions are the engine's own, so there is nothing to be wrong about them.
# The time of a step is fitted; the network, other users of the machine and a card that gets hot are not in it. What was
# compared with real runs stands in docs/fleet.md, with the differences. Take it for what it is good at: which of two
# designs is better, where the wall is, and what happens on the day that you do not want to try out.
#
# ## Your turn
#
# There is no `make stage-10-exercise`. Three questions instead, which a simulation settles:
#
# - **How fast is small?** If 99 of 100 first tokens are to come within 200 ms: how many requests per second does one
#   replica serve with 8 billion parameters, and how many with 0.6 (`Qwen3-0.6B`)?
# - **Bursts.** `cv` is the standard deviation of the gaps between arrivals over their mean; it is 1 in this chapter.
#   How much more room to spare does `cv=3` need for the same slowest of a hundred?
# - **Growing.** `FleetOptions(autoscaling=...)` adds replicas when the queue grows. How large must the fleet be at the
#   least, so that a start-up time of a minute does not hurt anybody when the rate doubles?
#
# ## Further reading
#
# - Agrawal et al., [Vidur](https://arxiv.org/abs/2405.05465), 2024: a simulator of such engines, with schedulers of its
#   own, and a search for the cheapest set-up.
# - Zhong et al., [DistServe](https://arxiv.org/abs/2401.09670), 2024: goodput, the rate at which targets are met.
# - Mitzenmacher, [The Power of Two Choices in Randomized Load
#   Balancing](https://www.eecs.harvard.edu/~michaelm/postscripts/tpds2001.pdf), 2001.
# - Dean, Barroso, [The Tail at Scale](https://research.google/pubs/the-tail-at-scale/), 2013: why the slowest of a
#   hundred is what people meet.
# - In Ray: `python/ray/serve/_private/request_router/`, and `python/ray/llm/_internal/serve/routing_policies/`.
