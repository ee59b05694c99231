# %% [markdown]
# # 9. Speculative decoding: guess, then verify
#
# Every engine so far pays for a token with a whole step: all weights are read, and one token of each request comes out.
# This chapter gets several tokens out of a step, and changes none of them. The trick is old: somebody quick proposes,
# somebody careful checks, and checking is cheaper than writing.
#
# You meet it in `nanovllm`, where it is three small files: `engine/guesses.py` and `runner/draft.py` guess,
# `sampling/acceptance.py` decides.
#
# **About 35 minutes.** You need notebook 8. This chapter has no exercises that are tested: it ends with three changes
# to the engine, which are yours to judge.

# %%
import json
import time

import torch

from benchmarks.engine.speculation import ReplayProposer, acceptance, time_a_token, tokens_per_step
from benchmarks.lib.harness import RESULTS
from benchmarks.lib.process import Engine
from nanovllm import LLM, SamplingParams
from nanovllm.engine.guesses import NgramProposer
from nanovllm.engine.scheduler import Scheduler
from nanovllm.sampling.acceptance import accept_or_resample, sample_guesses
from nanovllm.sampling.state import SamplingMetadata
from tools.pictures.plots import bars, lines
from tools.pictures.steps import swimlane
from tools.pictures.three_requests import (
    BLOCK_SIZE,
    NAMES,
    NUM_BLOCKS,
    ROOT,
    SEATS,
    STORY_MODEL,
    Run,
    compare,
    hugging_face_greedy,
    load_tokenizer,
    show_table,
    source,
    three_requests,
)

torch.set_num_threads(1)
tokenizer = load_tokenizer()
prompts, stage_params = three_requests()
params = [SamplingParams(temperature=0, max_tokens=p.max_tokens) for p in stage_params]
SMALL = {"device": "cpu", "max_num_seqs": SEATS, "kvcache_block_size": BLOCK_SIZE, "num_kv_blocks": NUM_BLOCKS}
DRAFT = {"model": ROOT / "assets" / "story_draft", "k": 4}
NGRAM = {"method": "ngram", "k": 4, "n": 2}


def as_drawn(events):  # the pictures number requests and count steps from 1
    return [e | {"request": int(e["request"]), "step": e["step"] + (e["type"] != "added")} for e in events]


def run(prompts, params, **config):  # what came out, and how guessing went
    with LLM(STORY_MODEL, on_event=(events := []).append, **SMALL | config) as llm:
        outputs = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    return Run(outputs, as_drawn(events)), llm.engine.scheduler.speculation


# %% [markdown]
# ## The three requests

# %%
whole, _ = run(prompts, params)
swimlane(whole.events, names=NAMES, title="Without guesses: who runs when")

# %% [markdown]
# You know this picture. Behind the prompts, every box stands for one token.
#
# ## What hurts
#
# Those boxes are expensive, and mostly for nothing. To compute one token, every weight of the model comes out of memory
# once. To compute five tokens, every weight comes out of memory once, too. So how much longer do five take? Here is
# this model on one core of your machine:

# %%
llm = LLM(STORY_MODEL, device="cpu", kv_cache_gib=0.05)
model = llm.engine.executor.runner.target.model
counts = (1, 2, 4, 8, 16, 32, 64)
cost = {}
with torch.inference_mode():
    for n in counts * 3:
        ids, start = torch.arange(n), time.process_time()
        for _ in range(5):
            model.logits(model(ids, ids, lambda layer, q, k, v: q))
        cost[n] = min(cost.get(n, 1e9), (time.process_time() - start) / 5)
lines(
    {
        "measured": (counts, [1e3 * cost[n] for n in counts]),
        "if each token cost the same": (counts[:5], [1e3 * cost[1] * n for n in counts[:5]]),
    },
    xlabel="tokens computed together",
    ylabel="time [ms]",
    title="What a step costs, attention aside",
    markers=True,
)

# %% [markdown]
# A few tokens more cost little. On a GPU the flat part is far longer: by its data sheet, an H100 can compute some 300
# tokens in the time in which it reads the weights. But a request has only one token to compute, for the next one is not
# known. Unless somebody guesses it.
#
# ## Guess first
#
# Beside the story model lies a smaller one that was trained on the same stories, `assets/story_draft`. It is allowed to
# guess four tokens in a row; then one step of the big model verifies all four. **Guess:** how many tokens will such a
# step bring on average, greedily? (It is one at least, the model's own, and five at most.)

# %%
my_guess = None  # tokens a step

# %%
# NBVAL_CHECK_OUTPUT
stories = json.loads((ROOT / "tests" / "data" / "story_prompts.json").read_text(encoding="utf-8"))["prompts"][:8]
long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
wide = {"max_num_seqs": 8, "num_kv_blocks": 120}
_, stats = run(stories, long, **wide, speculative=DRAFT)
compare(my_guess, stats.mean_accepted_length, "tokens a step")
print(f"{stats.num_steps} steps of a sequence; of the first guesses {stats.accepted[0]} were right")

# %% [markdown]
# ## The idea in pictures
#
# The three requests again, with the draft. The number in a box is how many tokens of the request the step computes: its
# last one, and up to four guesses. Hatched: it begins before the end of the last box, as some guesses there were wrong.

# %%
guessed, _ = run(prompts, params, speculative=DRAFT)
swimlane(guessed.events, names=NAMES, title="With a draft model: who runs when")

# %%
# NBVAL_CHECK_OUTPUT
print("same tokens:", guessed.outputs == whole.outputs)
for label, each in {"without guesses": whole, "with a draft": guessed}.items():
    print(f"{label:15}: {max(e['step'] for e in each.events):2d} steps")

# %% [markdown]
# What each step of request B brought. A right guess is followed by the next one; the first wrong guess is replaced by
# what the model itself says there, and everything behind it is worthless.

# %%
# NBVAL_CHECK_OUTPUT
for e in guessed.events:
    if e["request"] == 1 and e["type"] == "token":
        right, own = tokenizer.decode(e["ids"][:-1]), tokenizer.decode(e["ids"][-1:])
        guesses = "1 guess  " if len(e["ids"]) == 2 else f"{len(e['ids']) - 1} guesses"
        print(f"step {e['step']:2d}: {guesses} right {right!r:32} and then {own!r}")

# %% [markdown]
# ## Nothing new in the scheduler
#
# A step computes some tokens of each sequence: a whole prompt, a chunk of it, one token. Why not five? Guesses are
# tokens behind the last known one, and the logits behind each of them say what should have come next. All that is added
# is who gets them (whoever is to sample, from what the others leave of budget and blocks), and how to forget the wrong
# ones:

# %%
# NBVAL_CHECK_OUTPUT
source(Scheduler._speculate, Scheduler._roll_back)

# %% [markdown]
# Keys and values of wrong guesses stay where they are, behind the end, until the next step writes over them. Blocks
# that hold nothing else go back. And none of them ever gets a name in the prefix cache, since a block is named when its
# tokens are known, at the commit, as in chapter 8.
#
# ## The rule
#
# Greedily it is plain: a guess is right if it is what the model would have said. But what if tokens are *drawn*? The
# draft draws a token $x$ from its distribution $q$; the model wants $p$. Taking $x$ as it comes would give $q$. So:
#
# - accept $x$ with probability $\min(1, p(x) / q(x))$;
# - else draw from what is missing, $\max(p - q, 0)$, normalised.
#
# Why is that $p$? A token $x$ comes out in two ways. Guessed and accepted:
# $q(x) \min(1, p(x)/q(x)) = \min(p(x), q(x))$. Or something was rejected, which happens with probability
# $1 - \sum \min(p, q)$, and that is just the sum of $\max(p - q, 0)$: so the second draw contributes
# $\max(p(x) - q(x), 0)$. Together $\min(p, q) + \max(p - q, 0) = p$, whatever $q$ was. A bad draft costs time, never
# quality.
#
# In the code ($u$ is a uniform random number, and $u \, q < p$ saves a division by zero):

# %%
# NBVAL_CHECK_OUTPUT
source(accept_or_resample)

# %% [markdown]
# Do not believe it, count it. A vocabulary of eight tokens, a target, a draft that sees things differently, and 50,000
# draws:

# %%
# NBVAL_CHECK_OUTPUT
N = 50_000
target = torch.tensor([2.0, 1.0, 0.5, 0.3, 0.0, -0.5, -1.0, -2.0])  # logits
draft = torch.tensor([0.5, 1.5, -0.5, 1.0, 0.2, 0.4, -3.0, 0.0])
p, q = target.softmax(0), draft.softmax(0)
metadata = SamplingMetadata(torch.ones(N), torch.arange(N) * 7919 + 1, torch.zeros(N))
guesses, drawn_from = sample_guesses(draft.repeat(N, 1), metadata)
tokens = accept_or_resample(target.repeat(N, 1), metadata, guesses, drawn_from)
share = {name: torch.bincount(x, minlength=8) / N for name, x in {"guesses": guesses, "tokens": tokens}.items()}
chi_square = {name: float(((x - p) ** 2 / p).sum() * N) for name, x in share.items()}
print("chi-square against the target (7 degrees of freedom; above 24 once in a thousand):")
print("  what was guessed:", "far above" if chi_square["guesses"] > 1000 else chi_square["guesses"])
print("  what came out:   ", "below 24" if chi_square["tokens"] < 24 else chi_square["tokens"])
print(f"accepted {(guesses == tokens).float().mean():.2f}, the overlap of both is {torch.minimum(p, q).sum():.2f}")

# %%
bars(
    {name: [100 * float(x) for x in values] for name, values in {"target": p, **share}.items()},
    range(8),
    xlabel="token",
    ylabel="share [%]",
    title="Guessed from another distribution, and yet the target's",
)

# %% [markdown]
# Two things are easy to get wrong here, and tests hold them (`tests/kernels/test_rejection.py` plants five such
# mistakes). Temperature, top-p and penalties belong to $p$ *and* to $q$: $q$ is what the guess was really drawn from.
# And penalties count tokens, so the second guess has to be judged as if the first one were already part of the text.
#
# ## Guessing without a model
#
# Often the next words stand in the text already: a summary quotes, an edited program repeats the program. So look for
# the latest place where the last $n$ tokens stand, and guess what followed there.

# %%
# NBVAL_CHECK_OUTPUT
source(NgramProposer.propose)

# %% [markdown]
# Here $q$ is a single token, with certainty. Then the rule needs no rejection at all: draw from $p$ as ever; if it is
# the guess, well.
#
# ## Is it right?

# %%
# NBVAL_CHECK_OUTPUT
expected = hugging_face_greedy(prompts, params)
trials = {
    "draft": {"speculative": DRAFT},
    "draft, nine at a time": {"speculative": DRAFT | {"k": 9}},
    "n-grams": {"speculative": NGRAM},
    "draft, blocks of 1": {"speculative": DRAFT, "kvcache_block_size": 1, "num_kv_blocks": 200},
    "draft, in six blocks": {"speculative": DRAFT, "max_num_seqs": 3, "num_kv_blocks": 6},
    "draft, in chunks of 7": {"speculative": DRAFT, "max_num_batched_tokens": 7},
}
for label, config in trials.items():
    trial, _ = run(prompts, params, **config)
    preempted = sum(e["type"] == "preempted" for e in trial.events)
    verdict = [ours == theirs for ours, theirs in zip(trial.outputs, expected, strict=True)]
    print(f"{label:21} identical to transformers: {verdict}, {preempted} preemptions")

# %% [markdown]
# ## How often is it right?
#
# The draft goes on from its own guesses, so the later ones stand on the earlier. A guess counts only if all before it
# were right:

# %%
# NBVAL_CHECK_OUTPUT
far, eight = run(stories, long, **wide, speculative=DRAFT | {"k": 8})[1], range(1, 9)
a = acceptance(far)
print(f"of the guesses that were looked at, {a:.0%} were accepted")
print("accepted, by position:", *(f"{share:.0%}" for share in far.acceptance_by_position))

# %%
bars(
    {"measured": [100 * share for share in far.acceptance_by_position], "a, a², a³, ...": [100 * a**i for i in eight]},
    eight,
    xlabel="guess of a step",
    ylabel="accepted, with all before it [%]",
    title="Acceptance by position",
)

# %% [markdown]
# If each guess is right with probability $a$, whatever came before, a step with $k$ of them brings
# $1 + a + a^2 + \dots + a^k = (1 - a^{k+1}) / (1 - a)$ tokens. Real text is kinder than that: easy passages and hard
# ones come in stretches, so who was right so far is more likely to be right again.

# %%
# NBVAL_CHECK_OUTPUT
measured = {}
for k in (1, 2, 4, 8):
    found = run(stories, long, **wide, speculative=DRAFT | {"k": k})[1]
    measured[k] = found.mean_accepted_length
    theory = tokens_per_step(acceptance(found), k)
    print(f"k={k}: {measured[k]:.2f} tokens a step; from its acceptance of {acceptance(found):.0%} follow {theory:.2f}")

# %%
lines(
    {"measured": (list(measured), list(measured.values()))}
    | {f"a = {a:.0%}": (range(1, 9), [tokens_per_step(a, k) for k in range(1, 9)]) for a in (0.9, 0.75, 0.5)},
    xlabel="guesses in a step, k",
    ylabel="tokens a step",
    title="What more guesses bring",
    markers=True,
)

# %% [markdown]
# Guessing farther ahead pays less and less, and each guess costs: a turn of the draft, and a place in the step.
#
# ## When it wins, and when it loses
#
# All this lives on idle arithmetic, on the flat part of the first curve. A batch of 64 has no flat part left: it
# computes 64 tokens already, and guesses only make it 320. To see this apart from the quality of a draft, guesses of a
# *chosen* quality are replayed (`benchmarks/engine/speculation.py`): what will come is known from an earlier run, and
# as many of the guesses are spoilt as one likes. **Guess:** with four guesses a step, 60% of them right, from which
# batch size on does it lose, on one core and with this model?

# %%
my_guess = None  # requests at a time

# %%
BATCHES, TOKENS = (1, 4, 16, 48), 16
options = {"device": "cpu", "max_num_seqs": 48, "kvcache_block_size": 16, "num_kv_blocks": 200, "max_model_len": 64}
plain = Engine("nanovllm", STORY_MODEL, options, time.time())
guesser = Engine("nanovllm", STORY_MODEL, options | {"speculative": {"method": "ngram", "k": 4}}, time.time())
openings = [[7 * i + j for j in range(12)] for i in range(48)]
known = {str(i): o.outputs[0].token_ids for i, o in enumerate(plain.generate(openings, [TOKENS] * 48))}
scheduler = guesser.llm.engine.scheduler
scheduler.proposer = ReplayProposer(known, 0.6, vocab_size=4096)
gain = {}  # by batch size
for batch in BATCHES:
    without, found = (time_a_token(engine, openings[:batch], TOKENS) for engine in (plain, guesser))
    step_ms = found["ms_per_token"] * found["tokens_per_step"]
    gain[batch] = tokens_per_step(0.6, 4) * without["ms_per_token"] / step_ms  # a step without guesses brings one token
loses = [batch for batch in BATCHES if gain[batch] < 1]
compare(my_guess, loses[0] if loses else float("inf"), f"requests at a time (of {BATCHES})")

# %% [markdown]
# A step with guesses takes longer than one without, by a factor that grows with the batch. It breaks even where it
# brings as many tokens more. From the factor follows the share of guesses that has to be right. The picture is drawn
# from the recorded measurement, which was made with more care (`python -m benchmarks.engine speculation`):

# %%
recorded = json.loads((RESULTS / "speculation.json").read_text(encoding="utf-8"))["figures"]
medians = {f["key"]: {name: value["median"] for name, value in f["values"].items()} for f in recorded}
batches = [int(key.removeprefix("ms_per_token_")) for key in medians if key.startswith("ms_per_token_")]
per_step = {k: medians["tokens_per_step"][f"k={k} at 0.6"] for k in (2, 4, 8)}
shares = [i / 200 for i in range(201)]


def must_be_right(k: int, batch: int) -> float:  # percent
    longer = {b: medians[f"ms_per_token_{b}"][f"k={k} at 0.6"] / medians[f"ms_per_token_{b}"]["none"] for b in batches}
    return 100 * next((s for s in shares if tokens_per_step(s, k) >= longer[batch] * per_step[k]), 1.0)


lines(
    {f"k = {k}": (batches, [must_be_right(k, batch) for batch in batches]) for k in per_step},
    xlabel="requests in the batch",
    ylabel="guesses that must be right [%]",
    title="Break-even: above its curve speculation gains",
    markers=True,
)

# %% [markdown]
# From eight requests on, few guesses break even earliest; below that a few more tokens cost next to nothing, and the
# curves cross. Many guesses win most where the batch is small and the draft is good. The draft's own time is
# not in it: here guesses are free, as n-grams are. A draft model whose turn takes a tenth of a step adds half a step
# for four guesses, and has to be right more often.
#
# The measurement behind it:

# %%
show_table("speculation", RESULTS)

# %% [markdown]
# A server knows how full it is. The scheduler gives guesses what budget is left, and they cost nobody else a place or a
# block; but it does not yet give them up by itself when the batch grows. That would be a nice change of `_speculate`.
#
# ## Your turn
#
# There is no `make stage-9-exercise`. Three changes to `nanovllm` instead, with a measure for each:
#
# - **Break it.** Let the second draw come from $p$ instead of $\max(p - q, 0)$ and draw the bars again: which tokens
#   come too often? Then run `pytest tests/kernels/test_rejection.py`.
# - **Be adaptive.** Let k follow the acceptance of a sequence so far (`seq.speculation`), or the size of the batch.
# - **Guess better.** `NgramProposer` takes the latest match of exactly n tokens. Try the longest match instead.
#
# **To think about.** (a) Speculation and asynchronous scheduling exclude each other here. What would `schedule` have to
# know that it does not? (b) The draft computes one token more than it guesses, and throws that guess away. Why? (c) Can
# a draft whose vocabulary differs from the target's be of use?
#
# ## Further reading
#
# - Leviathan, Kalman, Matias, [Fast Inference from Transformers via Speculative
#   Decoding](https://arxiv.org/abs/2211.17192), 2023, and Chen et al., [Accelerating Large Language Model Decoding with
#   Speculative Sampling](https://arxiv.org/abs/2302.01318), 2023: the rule, found twice in the same months.
# - Saxena, [Prompt Lookup Decoding](https://github.com/apoorvumang/prompt-lookup-decoding), 2023: n-grams as a draft.
# - Cai et al., [Medusa](https://arxiv.org/abs/2401.10774), 2024, and Li et al.,
#   [EAGLE](https://arxiv.org/abs/2401.15077), 2024: drafts that look into the target's own head.
# - In vLLM: `vllm/v1/spec_decode/` (the proposers), `vllm/v1/sample/rejection_sampler.py`.
