"""The three requests that open every notebook, and what else all notebooks need beside pictures.

A and B begin with the same 50 tokens (three blocks of 16 and a bit) and then go different ways; C is short and comes
last. They want 8, 24 and 16 tokens. Two of them can run at a time, so that somebody always has to wait.
"""

from __future__ import annotations

import inspect
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.core import Event, SamplingParams
from stages.manifest import load_chapter
from tools.exercises.exercises import find_holes, listing

ROOT = Path(__file__).resolve().parents[2]
STORY_MODEL = str(ROOT / "assets" / "story_model")
STORY_MOE = str(ROOT / "assets" / "story_moe")  # a mixture of experts with the same tokenizer
SEATS = 2  # how many of the three may run at a time: max_num_seqs, from stage 2 on
BLOCK_SIZE = 16
NUM_BLOCKS = 14

LOTTE = (
    '"Good morning, Lotte!" called Toby the piglet across the garden. Lotte the sparrow waved back and held up a '
    "lovely yellow button with four neat holes. Nobody in Nettlecombe had anything like it, and she kept it in a safe "
    "pocket."
)


@dataclass(frozen=True)
class Request:
    name: str
    text: str
    max_tokens: int


THREE = (
    Request("A", LOTTE + "\n\nOne rainy morning", 8),
    Request("B", LOTTE + "\n\nIn the night", 24),
    Request("C", "In Winterbourne everybody knew Mabel.", 16),
)
NAMES = tuple(request.name for request in THREE)


@dataclass(frozen=True)
class Run:
    """What an engine generated, and all events on the way."""

    outputs: list[list[int]]
    events: list[Event]


def load_tokenizer() -> Any:
    """The embedded model's tokenizer: `encode(text).ids` and `decode(ids)`."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(Path(STORY_MODEL) / "tokenizer.json"))


def three_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters as `generate` takes them. Greedy, so every engine must give the same tokens."""
    tokenizer = load_tokenizer()
    prompts = [tokenizer.encode(request.text).ids for request in THREE]
    return prompts, [SamplingParams(temperature=0, max_tokens=request.max_tokens) for request in THREE]


def record(
    engine_class: Callable[..., Any],
    prompts: list[list[int]] | None = None,
    params: SamplingParams | list[SamplingParams] | None = None,
    *,
    model: str = STORY_MODEL,
    **options: Any,
) -> Run:
    """Run an engine on an embedded model and keep its events; without prompts, on the three requests.

    `options` go to the engine: record(PagedEngine, max_num_seqs=2, block_size=16, num_blocks=14).
    """
    if prompts is None or params is None:
        if prompts is not None or params is not None:
            raise ValueError("give prompts and params, or neither of them to get the three requests")
        prompts, params = three_requests()
    events: list[Event] = []
    outputs = engine_class(model, on_event=events.append, **options).generate(prompts, params)
    return Run(outputs, events)


def hugging_face_greedy(
    prompts: list[list[int]], params: list[SamplingParams], model_path: str = STORY_MODEL
) -> list[list[int]]:
    """What `transformers` generates in float32, one prompt at a time: the judge of every notebook's live check."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on import tqdm laments that widgets are not installed
        import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    outputs = []
    for prompt, p in zip(prompts, params, strict=True):
        ids = torch.tensor([prompt])
        eos = [] if p.ignore_eos else model.generation_config.eos_token_id
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=p.max_tokens, do_sample=False, eos_token_id=eos
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def source(*pieces: Any) -> Any:
    """The source of functions, methods or classes as it stands in the repository, for display in a notebook.

    Exercises are shown as holes; our solutions are folded below.
    """
    from IPython.display import Markdown

    text = "\n\n".join(inspect.cleandoc("\n" + inspect.getsource(piece)) for piece in pieces)
    lines, folded = text.splitlines(), []
    for hole in reversed(find_holes(text)):
        solution = textwrap.dedent("\n".join(lines[hole.code : hole.end]))
        lines[hole.first : hole.end + 1] = [f"{' ' * hole.indent}...  # exercise {hole.name}: yours to write"]
        summary = f"<summary>Exercise {hole.name}: our solution</summary>"
        folded.append(f"\n<details>{summary}\n\n```python\n{solution}\n```\n\n</details>")
    return Markdown("\n".join(["```python", *lines, "```", *reversed(folded)]))


def show_table(name: str, results: Path) -> Any:
    """A measured result as the README shows it, or a line that says that it was not measured yet."""
    from IPython.display import Markdown

    from benchmarks.lib.report import table

    try:
        return Markdown(table(name, results))
    except ValueError as not_measured:
        print(not_measured)
        return None


def list_exercises(chapter: int | str) -> None:
    """Print the exercises of a stage (its number) or elective (its name) with minutes, difficulty and hints."""
    print(listing(load_chapter(str(chapter)), width=100))


def compare(guess: float | None, measured: float, unit: str) -> None:
    """Print a prediction beside the measurement. A guess of None is allowed."""
    if guess is None:
        print(f"your guess:  none yet\nmeasured:    {rounded(measured)} {unit}")
        return
    print(f"your guess:  {rounded(guess)} {unit}\nmeasured:    {rounded(measured)} {unit}")
    if guess > 0 and measured > 0:
        factor = max(guess / measured, measured / guess)
        verdict = "spot on" if factor < 1.05 else f"{'too high' if guess > measured else 'too low'} by {factor:.2g} x"
        print(f"             {verdict}")


def rounded(value: float) -> str:
    """Whole numbers as they are, others as exactly as a guess can be meant."""
    return f"{value:,.0f}" if value == value // 1 or value >= 100 else f"{value:.2g}"
