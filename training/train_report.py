"""`assets/README.md`, written from `assets/training.json` and from nothing else."""

from __future__ import annotations

from typing import Any


def render_readme(training: dict[str, Any]) -> str:
    """The report on the embedded model; every figure in it is one of `training`."""
    corpus, target, draft = training["corpus"], training["target"], training["draft"]
    scores, stories = training["validation"], training["stories"]
    lines = [
        "# The embedded model",
        "",
        "Generated from `training.json` by `python -m training.train_embedded_model`; do not edit.",
        "",
        "`story_model/` is a tiny Qwen3 that tells little stories, `story_draft/` a still smaller draft of it.",
        "Both were trained from scratch on the stories of `training/story_grammar.py`. Who is introduced at the",
        "beginning is needed until the end, so a wrong block of a KV cache can be *read*: the fox changes its name.",
        "",
        "| | target | draft |",
        "|---|---|---|",
        f"| parameters | {target['parameters']:,} | {draft['parameters']:,} |",
        f"| tokens seen | {target['tokens']:,} | {draft['tokens']:,} |",
        f"| epochs | {target['epochs']} | {draft['epochs']} |",
        f"| steps | {target['steps']:,} | {draft['steps']:,} |",
        f"| training time | {target['seconds']} s | {draft['seconds']} s |",
        f"| tokens a second | {target['tokens_per_second']:,} | {draft['tokens_per_second']:,} |",
        f"| validation loss (nats a token) | {scores['target_loss']} | {scores['draft_loss']} |",
        "",
        f"- Corpus: {corpus['stories']:,} stories, {corpus['tokens']:,} tokens, of {corpus['shortest']} to"
        f" {corpus['longest']} tokens each (mean {corpus['mean']}); no two alike"
        f" ({corpus['duplicates']} duplicates left out). Seed {training['seed']}.",
        f"- Held out: {corpus['held_out_rule']}. Validation: {scores['stories']} stories, {scores['tokens']:,} tokens"
        " of such combinations.",
        f"- Tokenizer: byte-level BPE, {training['vocab_size']:,} entries; end-of-text is `{training['eos']}`,"
        f" id {training['eos_id']}.",
        f"- The draft's argmax is the target's at {scores['agreement']:.1%} of the positions; speculative sampling"
        f" at temperature 1 would accept {scores['acceptance']:.1%} of its tokens.",
        f"- {stories['kept']} of {stories['count']} stories ({stories['share']:.1%}) keep name, species, friend and"
        f" object to the end (temperature {stories['temperature']}, no filters, held-out openings, judged by"
        " `training/story_check.py`).",
        f"- Trained on {training['device']}, torch {training['torch']}, transformers {training['transformers']}.",
        "",
        f"## {len(stories['samples'])} unedited samples",
        "",
        "The first of those stories. The opening, in italics, was given.",
    ]
    for number, sample in enumerate(stories["samples"], 1):
        rest = sample["text"][len(sample["opening"]) :]
        verdict = "kept" if not sample["problems"] else "; ".join(sample["problems"])
        lines += ["", f"### {number}. {sample['tokens']} tokens, {verdict}", "", f"*{sample['opening']}*{rest}"]
    return "\n".join(lines) + "\n"
