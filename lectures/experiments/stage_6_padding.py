"""Three texts in a batch of four rows. Padding writes to the scratch block, as it should, or to slot 0 of the pool."""

from unittest.mock import patch

from stages.core import SamplingParams, Sequence
from stages.stage_6_cuda_graphs import CUDAGraphEngine, Rows
from tools.pictures.three_requests import STORY_MODEL, load_tokenizer

TEXTS = [
    "On the edge of Willowbrook, under the roots of a beech tree, lived André the duck.",
    "In Winterbourne everybody knew Mabel.",
    "One golden day",
]
FROM, TO = "everyone", "his best"  # where the texts of the first differ
fill = Rows.fill


def careless(rows: Rows, batch: list[Sequence], block_size: int, scratch_block: int) -> None:
    fill(rows, batch, block_size, scratch_block)
    rows.slots[len(batch) :] = 0


tokenizer = load_tokenizer()
prompts = [tokenizer.encode(text).ids for text in TEXTS]
written: dict[str, list[list[int]]] = {}
for name, how in (("the scratch block", fill), ("slot 0", careless)):
    with patch.object(Rows, "fill", how):
        engine = CUDAGraphEngine(STORY_MODEL, max_num_seqs=4)
        written[name] = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=46))
right, wrong = written.values()
for i in range(len(TEXTS)):
    print(f"text {i}:", "as it should be" if wrong[i] == right[i] else "not as it should be")
for name, (tokens, *_) in written.items():
    text = tokenizer.decode(tokens)
    print(f"padding in {name:17}  … {text[text.index(FROM) : text.index(TO)]}…")
