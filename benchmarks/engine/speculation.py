"""When guessing ahead gains, and from which batch size on it loses.

Two results. `speculation`: an 8B shape, batches of 1 to 64, and guesses that are right as often as is chosen
(`ReplayProposer`), 2, 4 or 8 per step. `speculation_ngram`: SmolLM2-135M-Instruct alone on records in one format,
guessed from its own n-grams; left out where `make models` has not put the model into the cache. Each in one process
with two engines, one that speculates and one as it is by default, which take turns. On a CPU, in CPU time, the embedded
model stands for the shape.

The time per token: once every request has its first token, until one has its last.
"""

import random
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import ours
from benchmarks.lib import harness, tables
from benchmarks.lib.harness import Comparison, Figure, Measured, Showcase
from benchmarks.lib.process import CLOCKS, Engine, choose_clock, random_prompts
from benchmarks.lib.tables import Result
from benchmarks.stages.showcases import SMOLLM2
from nanovllm.engine.sequence import Sequence as EngineSequence
from nanovllm.outputs import SpeculationStats
from nanovllm.sampling_params import derive_seed

NONE = "none"
SIZES: dict[str, Any] = {"batches": [1, 2, 4, 8, 16, 32, 64], "prompt_len": 128, "num_tokens": 64}
CPU: dict[str, Any] = {**SIZES, "prompt_len": 32, "num_tokens": 40}
QUICK: dict[str, Any] = {"batches": [1, 3], "prompt_len": 6, "num_tokens": 24}
WARM_UP = 24  # tokens, more than two steps can bring
WAYS = {f"k={k} at {a}": {"k": k, "acceptance": a} for a in (0.6, 0.8) for k in (2, 4, 8)}
NGRAM_WAYS = {f"n-grams, k={k}": {"k": k} for k in (4, 8)}
TOLERANCE = 0.1  # between the acceptance that was chosen and the one measured, over all batches
SHIPS = ["Anna Norway coal", "Bella Malta grain", "Clara Norway timber", "Dora Greece salt"]
RECORD = "{}. ship={}, flag={}, cargo={}\n   status: arrived, unloaded and left for the north\n"
TEXT = "".join(RECORD.format(i, *ship.split()) for i, ship in enumerate(SHIPS, 1))


# --- guesses of a chosen quality --------------------------------------------------------------------------------------


class ReplayProposer:
    """Guesses tokens that are known: the share `acceptance` of each request's is right, in places drawn at random.

    What speculation gains depends on how often guesses are right. Here that is chosen, so that one measurement stands
    for any draft of that quality, the draft's own cost aside. The guesses are verified like all others: put this in the
    place of an engine's own proposer, `llm.engine.scheduler.proposer`.

    known: by request id, what the request will generate. Whether a guess is right depends on `seed`, the request and
    the position alone: on no batch, no k, and no preemption. Where nothing is known any more, nothing is guessed.
    Raises ValueError if `acceptance` is not in [0, 1].
    """

    def __init__(self, known: Mapping[str, Sequence[int]], acceptance: float, vocab_size: int, seed: int = 0) -> None:
        if not 0 <= acceptance <= 1:
            raise ValueError(f"acceptance must be in [0, 1]; got {acceptance!r}")
        self.guesses = {}
        for number, (request_id, tokens) in enumerate(known.items()):
            rng, num_wrong = random.Random(derive_seed(seed, number)), round((1 - acceptance) * len(tokens))
            wrong = set(rng.sample(range(len(tokens)), num_wrong))
            self.guesses[request_id] = [(t + (i in wrong)) % vocab_size for i, t in enumerate(tokens)]

    def propose(self, seq: EngineSequence, k: int) -> list[int | None]:
        first = seq.num_output_tokens
        return [*self.guesses[seq.request_id][first : first + k]]


def acceptance(stats: SpeculationStats) -> float:
    """The share of accepted guesses among those that were looked at, all before them in their step being right.

    Raises ValueError if no guess was verified.
    """
    if not stats.num_steps:
        raise ValueError("no guess was verified, so there is no share of accepted ones")
    looked_at = stats.proposed[0] + sum(map(min, stats.accepted, stats.proposed[1:]))
    return sum(stats.accepted) / looked_at


def tokens_per_step(acceptance: float, k: int) -> float:
    """What a step that verifies k guesses brings on average: 1 + a + ... + a**k (Leviathan et al., 2023)."""
    return float(sum(acceptance**i for i in range(k + 1)))


# --- one process ------------------------------------------------------------------------------------------------------


def measure(
    engine: Engine,
    repeats: int,
    batches: list[int],
    prompts: list[list[int]],
    num_tokens: int,
    ways: dict[str, dict[str, Any]],
    plain: dict[str, Any],
    steady: bool,
) -> list[dict[str, Measured]]:
    """In the process of both engines: of each repetition, each way's scenarios. `plain`: arguments of the other one."""
    rival = Engine(**plain, started=engine.started)
    for each in (engine, rival) if steady else ():
        make_steady(each.llm.engine.executor.runner.target.model)
    known = {i: o.outputs[0].token_ids for i, o in enumerate(rival.generate(prompts, [num_tokens] * len(prompts)))}
    scheduler, vocab_size = engine.llm.engine.scheduler, engine.llm.engine.vocab_size
    own_proposer = scheduler.proposer

    def run(name: str, batch: int, limit: int) -> dict[str, float]:
        if name == NONE:
            return time_a_token(rival, prompts[:batch], limit)
        scheduler.max_guesses, scheduler.proposer = ways[name]["k"], own_proposer
        if "acceptance" in ways[name]:
            answers = {str(i): known[i] for i in range(batch)}
            scheduler.proposer = ReplayProposer(answers, ways[name]["acceptance"], vocab_size)
        return time_a_token(engine, prompts[:batch], limit)

    names = [NONE, *ways]
    for name in names:
        for batch in batches if steady else batches[:1]:  # a CPU compiles nothing
            run(name, batch, min(num_tokens, WARM_UP))
    repetitions = []
    for repeat in range(repeats):
        found: dict[str, Measured] = {name: {} for name in names}
        for batch in batches:
            for name in harness.order_of_round(names, repeat):
                found[name][f"batch {batch}"] = run(name, batch, num_tokens)
        repetitions.append(found)
    return repetitions


def make_steady(model: torch.nn.Module) -> None:
    """Let random weights repeat the last token for ever, by a margin that no rounding closes: what comes is known."""
    weights = dict(model.named_parameters())
    embedding = weights["embed_tokens.weight"]
    with torch.no_grad():
        if "lm_head.weight" in weights:  # not tied
            weights["lm_head.weight"].copy_(embedding)
        embedding.mul_(1e4)


def time_a_token(engine: Engine, prompts: list[list[int]], num_tokens: int) -> dict[str, float]:
    """Milliseconds between two tokens of a request, all of them at once, greedy; and how guessing went meanwhile."""
    core = engine.llm.engine
    clock = CLOCKS[choose_clock(core.executor.runner.device.type, torch.get_num_threads())]
    params = engine.make_params(temperature=0, ignore_eos=True, max_tokens=num_tokens)
    for i, prompt in enumerate(prompts):
        core.add_request(str(i), prompt, params)
    seqs = list(core.scheduler.sequences.values())
    while any(seq.num_output_tokens == 0 for seq in seqs):
        core.step()
    before = sum(seq.num_output_tokens for seq in seqs)
    start, wall = clock(), time.perf_counter()
    while len(core.scheduler.sequences) == len(seqs):
        core.step()
    seconds, wall = clock() - start, time.perf_counter() - wall
    found = {
        "ms_per_token": 1e3 * seconds * len(seqs) / (sum(seq.num_output_tokens for seq in seqs) - before),
        "seconds": seconds,
        "wall_seconds": wall,
    }
    if guessed := [seq.speculation for seq in seqs if seq.speculation.num_steps]:
        total = guessed[0].total(guessed)
        assert total is not None
        found |= {"acceptance": acceptance(total), "tokens_per_step": total.mean_accepted_length}
    core.abort_all()  # forgets what it cached, too
    return found


# --- the comparison ---------------------------------------------------------------------------------------------------


def mean(name: str) -> Callable[[Measured], float | None]:
    """The mean over the batches of a metric that a contender without guesses does not have."""

    def value(measured: Measured) -> float | None:
        values = [scenario[name] for scenario in measured.values() if name in scenario]
        return sum(values) / len(values) if values else None

    return value


def loses_from(result: Result) -> dict[str, int | None]:
    """For every way of guessing the smallest batch from which on it never gains; None if it gains at the largest."""
    times = {int(f["key"].rpartition("_")[2]): f["values"] for f in result["figures"] if "ms_per_token" in f["key"]}
    found: dict[str, int | None] = {}
    for name in next(iter(times.values())):
        gains = [batch for batch, v in times.items() if v[name]["median"] < v[NONE]["median"]]
        found[name] = min((batch for batch in times if batch > max(gains, default=0)), default=None)
    return {name: batch for name, batch in found.items() if name != NONE}


def misses(result: Result, ways: dict[str, dict[str, Any]]) -> list[str]:
    """The ways whose guesses were not right as often as was chosen, in words."""
    measured = tables.figures(result)["acceptance"]["values"]
    medians = {name: measured[name]["median"] for name in ways}
    return [
        f"{name}: {medians[name]:.2f} of the guesses were accepted"
        for name, way in ways.items()
        if abs(way.get("acceptance", medians[name]) - medians[name]) > TOLERANCE
    ]


def compare(
    options: Namespace,
    name: str,
    title: str,
    workload: str,
    ways: dict[str, dict[str, Any]],
    config: dict[str, Any],
    **work: Any,
) -> list[str]:
    """Measure, print and write down one result; says what was not as it should be.

    config: of both engines. work: the other arguments of `measure`.
    """
    figures = harness.by_batch("ms_per_token", "time per token", work["batches"])
    figures.append(Figure("tokens_per_step", "tokens a step of a sequence", "", "higher", mean("tokens_per_step")))
    figures.append(Figure("acceptance", "accepted of the guesses looked at", "", "higher", mean("acceptance")))
    contenders = [ours(options, way) for way in (NONE, *ways)]
    shown = Showcase(name, title, workload, contenders, figures, contender=next(iter(ways)), rival=NONE)
    comparison = Comparison(shown, options)
    most = max(way["k"] for way in ways.values())
    guessing = ours(options, **config, speculative={"method": "ngram", "k": most})
    plain = {"package": "nanovllm", "model": str(options.model), "options": ours(options, **config).spec["options"]}
    arguments = {"repeats": options.repeats or 2, "ways": ways, "plain": plain, **work}
    for number in range(options.rounds or 1):
        measured = harness.run_process(guessing, measure, arguments, options)
        for contender in contenders:
            mine = [found[contender.name] for found in measured["repetitions"]]
            comparison.take(number, contender, {**measured, "repetitions": mine})
    result = comparison.finish()
    print(f"loses from batch: {loses_from(result)}")
    return misses(result, ways)


def replay(options: Namespace, batches: list[int], prompt_len: int, num_tokens: int) -> list[str]:
    """Guesses that are right as often as is chosen."""
    block_size, length = 16 if options.device == "cpu" else 256, prompt_len + num_tokens
    config = {
        "max_model_len": length,
        "max_num_seqs": max(batches),
        "num_kv_blocks": max(batches) * -(-length // block_size),
        "kvcache_block_size": block_size,
    }
    workload = f"greedy, {prompt_len} tokens in, {num_tokens} out, all requests of a batch at once; known guesses"
    prompts = random_prompts([prompt_len] * max(batches), 1, 500 if options.quick else 10_000)
    work = {"batches": batches, "prompts": prompts, "num_tokens": num_tokens, "steady": not options.quick}
    return compare(options, "speculation", "Guesses of a chosen quality", workload, WAYS, config, **work)


def ngrams(options: Namespace, num_tokens: int, tiny: bool) -> list[str]:
    """Guesses from the n-grams of a text."""
    prompt = [1, 2, 3, 4, 5, 6] * 2
    if not tiny:
        from tokenizers import Tokenizer

        prompt = Tokenizer.from_file(str(options.model / "tokenizer.json")).encode(TEXT).ids
    config: dict[str, Any] = {"max_model_len": len(prompt) + num_tokens, "max_num_seqs": 1, "load_format": "auto"}
    if options.device != "cpu":
        config |= {"dtype": "bfloat16", "num_kv_blocks": 8}
    workload = f"greedy, one request, {len(prompt)} tokens of records in one format, {num_tokens} out"
    work = {"batches": [1], "prompts": [prompt], "num_tokens": num_tokens, "steady": False}
    return compare(options, "speculation_ngram", "Guesses from the text itself", workload, NGRAM_WAYS, config, **work)


def run(options: Namespace) -> bool:
    """Measure both. Says whether the guesses were as good as was chosen, which a tiny run is too short for."""
    tiny, cpu = options.quick, options.device == "cpu"
    clock, threads = choose_clock(options.device, 1), 1 if cpu else None
    chosen = Namespace(**vars(options) | {"quick": tiny or cpu, "clock": clock, "threads": threads})
    missed = replay(chosen, **(QUICK if tiny else CPU if cpu else SIZES))
    if tiny or SMOLLM2.is_dir():
        chosen.model = chosen.model if tiny else SMOLLM2
        missed += ngrams(chosen, 24 if tiny else 96, tiny)
    print(*(f"not what was to be measured: {text}" for text in missed), sep="\n", flush=True)
    return tiny or not missed


def table(results: dict[str, Result]) -> list[str]:
    """What guessing ahead gains, by batch size, and from where on it loses."""
    lines: list[str] = []
    if result := results.get("speculation"):
        none, *ways = tables.contenders(result)
        lines += tables.head("batch", "without guesses (ms)", *ways)
        *times, per_step, accepted = result["figures"]
        for figure in times:
            gains = (tables.ratio(figure, way, none) for way in ways)
            lines.append(tables.row(figure["key"].rpartition("_")[2], tables.cell(figure, none), *gains))
        for figure in (per_step, accepted):
            medians = (tables.number(figure["values"][way]["median"], "times") for way in ways)
            lines.append(tables.row(figure["label"], "–", *medians))
        lost = loses_from(result).values()
        lines += [tables.row("loses from batch", "–", *("–" if batch is None else str(batch) for batch in lost)), ""]
        told = "The time a token, and how many times shorter guessing makes it."
        lines.append(f"{told} Workload: {result['workload']}; {tables.clock(result)}.")
        lines += ["", tables.origin({"speculation": result})]
    if result := results.get("speculation_ngram"):
        none, *ways = tables.contenders(result)
        figure, per_step, _ = result["figures"]
        gains = (
            f"{tables.ratio(figure, way, none)} with {way} ({tables.cell(per_step, way)} tokens a step that guesses)"
            for way in ways
        )
        text = f"{Path(result['model']['name']).name}, {result['workload']}: {tables.cell(figure, none)} ms a token "
        text += f"without guesses, gains {', '.join(gains)}; {tables.clock(result)}; commit {tables.commit(result)}."
        lines += ["", text]
    return lines
