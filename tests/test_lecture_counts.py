"""Counts that lectures show or speak, and that no directive fetches, follow from what the notebooks and results say.

For each lecture a function makes its phrases out of numbers that are found or computed here; each phrase must be in the
lecture, and what they do not cover must be free of numbers with two digits or more.
"""

import ast
import re
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

import pytest

from tests.in_words import in_words
from tools import ROOT
from tools.exercises.exercises import find_holes
from tools.lectures import pulls
from tools.lectures.lecture import lecture_path, read_lecture
from tools.pictures.three_requests import BLOCK_SIZE, three_requests
from tools.race.replay import DEFAULT
from tools.race.workload import load_race
from tools.scheduler_page.build import scenes

NOTEBOOKS = {int(path.name[0]): f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("[1-7]_*.ipynb")}
# Numbers that are names, years, or numbers of holes
NO_COUNTS = r"Llama-\S+|[AH]\d00|float\d\d|\d+-bit|\b(?:19|20)\d\d\b|`[^`]*`|\b\d\.\d\b"
LLAMA = 8.03e9  # parameters of Llama-3.1-8B

prompts, params = three_requests()
A, B, C = LENGTHS = [len(prompt) for prompt in prompts]
WANTED = [p.max_tokens for p in params]
COMMON = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*prompts[:2], strict=False))))


def source(stage: int, cell: str, pattern: str) -> Any:
    """A Python value in the source of a stage's notebook."""
    found = re.search(pattern, "".join(pulls.find_cell(NOTEBOOKS[stage], cell)["source"]), re.DOTALL)
    assert found is not None, pattern
    return ast.literal_eval(found[1])


def printed(stage: int, cell: str, pattern: str) -> list[int]:
    """The numbers that a cell of a stage's notebook printed after a pattern, wherever it matches."""
    found = re.findall(pattern, pulls.pull_output(NOTEBOOKS[stage], cell))
    assert found, pattern
    return [
        int(number.replace(",", "")) for match in found for number in ([match] if isinstance(match, str) else match)
    ]


def workload(stage: int) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", pulls.result(f"stage_{stage}")["workload"])]


def groups(values: list[Any], size: int) -> list[list[Any]]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def num_holes(stage: int) -> tuple[int, int]:
    """Holes of a stage's exercise, and their lines."""
    [path] = (ROOT / "stages").glob(f"stage_{stage}_*.py")
    holes = find_holes(path.read_text(encoding="utf-8"))
    return len(holes), sum(hole.num_code_lines for hole in holes)


def medians(stage: int, key: str) -> dict[str, float]:
    return {who: value["median"] for who, value in pulls.figure(f"stage_{stage}", key)["values"].items()}


def stage_1() -> Iterator[str]:
    holes, lines = num_holes(1)
    yield f"what they need: {in_words(lines)} lines in all"
    yield f"our {in_words(lines)} lines?"
    yield f"The file has {in_words(holes)} holes"
    yield f"A and B open with the same {in_words(COMMON)} tokens"
    yield f"They want {WANTED[0]}, {WANTED[1]} and {WANTED[2]} tokens"
    yield f"prompt tokens and wants {WANTED[1]}"
    heads, shared = (int(pulls.pull_model(f"num_{kind}_heads")) for kind in ("attention", "key_value"))
    yield f"each used by {in_words(heads // shared)} of them"
    draws = in_words(source(1, "hot = [SamplingParams", r"draws = (\d+)"))
    yield f"{draws} draws with {draws} seeds"
    chances = re.findall(r"(\d+)%", pulls.pull_printed("stage_1_how_sure"))
    assert 0.4 < sum(int(chance) == 100 for chance in chances) / len(chances) < 0.5
    yield "Nearly half of the words"
    lengths = source(1, "stutter = prompts", r"lengths = (\[.*?\])")
    yield f"A text of {lengths[-1]} tokens instead of {lengths[1]}"
    yield f"{in_words(lengths[-1] // lengths[1]).capitalize()} times as many tokens"
    short, long, _ = workload(1)
    assert round(long, -2) == 400
    yield "for a text of some four hundred tokens"
    assert medians(1, "ms_384")["HF with cache"] < 1.5 * medians(1, "ms_64")["HF with cache"]
    yield f"{in_words(long // short).capitalize()} times the prompt, and not even one and a half times the time"
    assert sum(C + n for n in range(500)) > 100_000
    yield "At five hundred tokens more than a hundred thousand have gone through"


def stage_2() -> Iterator[str]:
    sent = sum(length + n for length, wanted in zip(LENGTHS, WANTED, strict=True) for n in range(wanted))
    yield f"they send **{sent:,}** tokens"
    yield f"they generate {WANTED[0]}, {WANTED[1]} and {WANTED[2]}"
    yield f"{in_words(sum(LENGTHS)).capitalize()} of the prompts"
    layers, heads, size, width = source(2, "models = {", r"Llama-3.1-8B, bf16\": (\(.*?\))")
    yield f"{layers} layers, {heads} key/value heads of {size} numbers, {width} bytes a number"
    [chat, without] = printed(2, "models = {", r"Llama.*, +([\d,]+) MiB")
    assert chat == 512
    yield "A chat weighs half a gigabyte"
    yield f"{in_words(round(LLAMA * width / (chat * 2**20))).capitalize()} people with such a chat"
    yield f"without grouped-query attention, {in_words(without // chat)} times as much"
    yield f"A text of {workload(2)[3]:,} tokens instead of {workload(2)[0]}"
    sizes = source(2, "sizes, rates = ", r"sizes, rates = (\[.*?\]),")
    yield f"{in_words(sizes[-1]).capitalize()} requests in one batch"
    yield f"{in_words(workload(2)[4])} requests in one step"


def stage_3() -> Iterator[str]:
    lengths = source(3, "ROWS, COLUMNS", r"lengths = (\[.*?\]) \*")
    (*shorts, long) = lengths
    average = [round(sum(pair[i] for pair in shorts) / len(shorts)) for i in (0, 1)]
    yield f"({long[0]} tokens in, {long[1]} out), the others are short (about {average[0]} in, {average[1]} out)"
    blocks = source(3, 'changes = [{"admitted": 1', r"num_blocks=(\d+)")
    yield f"as {blocks} blocks of {BLOCK_SIZE}"
    before, after = printed(3, 'changes = [{"admitted": 1', r"stage \d: (\d+) sequences")
    assert after == 2.5 * before
    yield "Two and a half times as many"
    yield f"{in_words(after).capitalize()}, and the whole work is done in half the steps"
    steps = printed(3, 'changes = [{"admitted": 1', r"(\d+) steps")
    assert steps[1] == steps[0] / 2
    yield f"a step with {in_words(after)} tokens costs hardly more than one with {in_words(before)}"
    each = [-(-(n + m - 1) // BLOCK_SIZE) for n, m in lengths]
    assert (blocks // sum(each), blocks % sum(each)) == (2, each[0] + each[1])
    assert each[0] == each[1] == each[2] == 2
    yield f"Two, two, two and {in_words(each[3])} blocks are {in_words(sum(each))} for four requests"
    yield f"blocks have {BLOCK_SIZE} slots"
    position = source(3, "index, offset = position // BLOCK_SIZE", r"position = (\d+)")
    index, offset = divmod(position, BLOCK_SIZE)
    yield f"{in_words(position).capitalize()} is {in_words(index)} times {in_words(BLOCK_SIZE)} and {in_words(offset)}"
    sizes = source(3, "pool.num_blocks_for", r"for size in (\(.*?\)):")
    assert {1, 16, 128} <= set(sizes)
    yield "with blocks of 1, 16 and 128"
    yield f"and everybody takes {BLOCK_SIZE}"
    yield f"With blocks of {sizes[-1]} we are back at the rectangle"
    blocks_of_11 = pulls.pull_found(NOTEBOOKS[3], "holdings(paged.events, step=40)", r"request 11:.*(\[.*\])")
    table = ast.literal_eval(blocks_of_11)
    assert [b - a for a, b in groups(table, 2)] == [1] * 4 and all(b - a != 1 for a, b in groups(table[1:-1], 2))
    yield "four separate pairs of blocks"
    yield "Request 11 lies in blocks"
    yield "Follow request 11 through"


def stage_4() -> Iterator[str]:
    yield f"Blocks hold {BLOCK_SIZE} tokens. A and B share their first {COMMON}."
    yield f"the same {in_words(COMMON)} tokens about Lotte"
    shared = COMMON // BLOCK_SIZE * BLOCK_SIZE
    yield f"B {in_words(B - shared)} tokens, C {in_words(C)}"
    yield f"{in_words(shared // BLOCK_SIZE).capitalize()} blocks of sixteen are {in_words(shared)} tokens"
    yield f"The remaining {in_words(COMMON - shared)} of the {in_words(COMMON)}"
    chats = ast.literal_eval(pulls.pull_found(NOTEBOOKS[4], "drawn = (generate_story", r"prompts: (.+)"))
    [story] = printed(4, "drawn = (generate_story", r"story: (\d+)")
    assert round(story, -2) == 500 and round(sum(chats) / 5 - story, -1) == 60
    yield "The story has about five hundred tokens, each question adds some sixty"
    yield f"{in_words(chats[1] - story // BLOCK_SIZE * BLOCK_SIZE)} to compute instead of"
    yield f"The file has {in_words(num_holes(4)[0])} holes"
    told = pulls.pull_output(NOTEBOOKS[4], "gives back")
    taken = [ast.literal_eval(blocks) for blocks in re.findall(r"takes (.*)", told)]
    pool = source(4, "lru_names = [", r"num_blocks=(\d+)")
    full = (A + WANTED[0] - 1) // BLOCK_SIZE
    yield f"A pool of {pool} blocks, one seat."
    yield f"**A** runs and leaves {len(taken[0])} blocks, {in_words(full)} of them full"
    yield f"then **C** leaves {len(taken[1])}; then **D** needs {len(taken[2])}"
    assert len(set(range(pool)) - set(taken[0]) - set(taken[1])) == 2
    yield "Two blocks were never used"
    many, length = workload(4)[3:5]
    yield f"{in_words(many).capitalize()} prompts with nothing in common"
    yield f"Prompts of {length} tokens"
    assert int(pulls.pull_model("vocab_size").replace(",", "")) > 256
    yield "there are more than 256 tokens in a vocabulary"


def stage_5() -> Iterator[str]:
    lengths = source(5, "static = record(PrefixCachingEngine, twelve", r"lengths = (\[.*?\])  #")
    tokens, seats = sum(m for _, m in lengths), 4
    # In stage 4 a batch lasts as long as its longest output, and prompts are prefilled one at a time
    late = sum(len(batch) - 1 for batch in groups(lengths, seats))
    static = late + sum(max(m for _, m in batch) for batch in groups(lengths, seats))
    yield f"Stage 4 needs {static} steps"
    yield f"From {static} steps to"
    yield f"{in_words(late)} of its steps are due to its habit"
    yield f"{in_words(len(lengths)).capitalize()} requests want **{tokens}** tokens together. Four seats"
    yield f"{in_words(tokens).capitalize()} through four is {in_words(tokens // seats)}"
    assert printed(5, "continuous = record(ContinuousBatchingEngine, twelve", r"(\d+) steps") == [tokens // seats + 1]
    yield "One more than the least that is possible"
    most, small = printed(5, "in_one_piece.outputs == in_chunks.outputs", r"at most (\d+)")
    budgets = printed(5, "in_one_piece.outputs == in_chunks.outputs", r"budget +(\d+)")
    assert round(most, -1) == 300 and small <= budgets[1]
    yield f"A prompt of some 300 tokens comes. The budget of a step is {budgets[0]}, or {budgets[1]}"
    b, found = len(three_requests()[0][1]), 3 * BLOCK_SIZE  # B's prompt, and its full blocks that A has as well
    yield f"| decode | 1 | {b + 7} − {b + 6} = **1** |"
    yield f"| {b} − 0 = **{b}** |"
    yield f"| {b} − {found} = **{b - found}** |"
    yield f"| 300 − 0 = **{budgets[1] - 1}** + {budgets[1] - 1} + … |"  # beside one that decodes
    yield f"| {b} + 7 − 0 = **{b + 7}** |"
    race = load_race(DEFAULT)[0].race.workload
    assert max(race.max_tokens) == 6 * 10 and sum(n == max(race.max_tokens) for n in race.max_tokens) == 5
    yield f"Another race, recorded: {len(race.prompts)} requests"
    blocks = source(5, "tight = record(ContinuousBatchingEngine", r"num_blocks=(\d+)")
    yield f"{in_words(blocks).capitalize()} blocks for six requests"
    cell = "TRANSITIONS = {"
    assert printed(5, cell, r"step +(\d+)  request 2  RUNNING  -> WAITING") == [2], "in step 2, so it has had one"
    [_, back] = printed(5, cell, r"step +(\d+)  request 2  WAITING  -> RUNNING")
    assert printed(5, cell, r"step +(\d+)  request 0  RUNNING  -> FIN") == [back - 1]
    yield "Request 2 was thrown out after its first step, and came back when request 0 was over"
    [start, _] = printed(5, cell, r"step +(\d+)  request 4  WAITING  -> RUNNING")
    [end] = printed(5, cell, r"step +(\d+)  request 4  RUNNING  -> WAITING")
    yield f"Request 4 lost {in_words(end - start)} steps of work"
    scene = next(scene for scene in scenes() if scene["name"] == "thrashing")
    [(prompt, output)] = {(request["prompt"], request["output"]) for request in scene["requests"]}
    pool, size, count = scene["num_blocks"], scene["block_size"], in_words(len(scene["requests"])).capitalize()
    assert round(pool * size / (prompt + output), 1) == 1.5
    yield "A pool for one request and a half"
    yield f"{count} requests, {prompt} tokens in and {output} out each"
    yield f"The pool has **{pool} blocks** of {in_words(size)} tokens"
    [enough] = re.findall(r"(?m)^(\d+) +\d+ +0 ", pulls.pull_printed("stage_5_thrashing"))
    yield f'Then move "blocks" to {enough}, and no cross is left'
    yield f"with {enough} blocks neither"
    yield scene["answers"][scene["right"]]
    yield f"{workload(5)[0]} requests, {workload(5)[5]} seats"
    shapes = source(5, "budgets = [8, 32, 128, 512]", r"shapes = (\[.*?\])")
    yield f"Sixteen requests, every fourth with a prompt of {shapes[3][0]} tokens"
    yield "The budget is {}, {}, {} or {} tokens".format(*source(5, "budgets = [8,", r"budgets = (\[.*?\])"))
    yield "a second with 128 as with 8?"


def stage_7() -> Iterator[str]:
    fits = dict(re.findall(r"^(\S+) .* fits on (\d+)", pulls.pull_output(NOTEBOOKS[7], "billions in {"), re.MULTILINE))
    assert int(fits["Llama-3.1-70B"]) > 1 == int(fits["Qwen3-8B"])
    yield "The 70 billion do not fit on one card. The 8 billion fit"
    hidden = int(pulls.pull_model("hidden_size"))
    yield f"{hidden} numbers of four bytes"
    odd = 2 * hidden - 1
    yield f"{odd} tokens on two ranks must be {-(-odd // 2)} and {-(-odd // 2)}"
    long = source(7, "known = list(range(5000))", r"range\((\d+)\)")
    yield f"A text of {long:,} tokens is being decoded"
    yield f"the same for a text of {in_words(long)} tokens"


BY_STAGE: dict[int, Callable[[], Iterator[str]]] = {
    1: stage_1,
    2: stage_2,
    3: stage_3,
    4: stage_4,
    5: stage_5,
    7: stage_7,
}


def text_of(stage: int) -> str:
    """What a lecture shows and speaks, without what is fetched or typed, in a single line."""
    slides = read_lecture(lecture_path(stage)).slides
    shown = [
        piece.text for slide in slides for piece in (*slide.body, *slide.script) if piece.kind in ("text", "say", "see")
    ]
    return " ".join(re.sub(r"\{\{.*?\}\}", "…", " ".join([*(slide.title for slide in slides), *shown])).split())


@pytest.mark.parametrize("stage", BY_STAGE)
def test_counts_follow_from_what_was_computed(stage: int) -> None:
    text = text_of(stage)
    for phrase in BY_STAGE[stage]():
        assert phrase in text, f"lectures/stage_{stage}.md does not say {phrase!r}, which is what follows now"
        text = text.replace(phrase, "…")
    typed = [text[max(0, m.start() - 40) : m.end() + 20] for m in re.finditer(r"\d{2,}", re.sub(NO_COUNTS, "", text))]
    assert not typed, "fetch them with a directive, or hold them here"
