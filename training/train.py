"""Train the embedded model, its draft and its mixture of experts: corpus, tokenizer, models, evaluation, report.

On one GPU, within a few minutes: `python -m training.train --out assets`.
The mixture of experts alone, with the tokenizer and beside the figures of the embedded models: `--only moe`.
On a CPU it takes hours; `--smoke` runs the same code on a miniature within a minute or two.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from tokenizers import Tokenizer

from training.corpus import EOS, EOS_ID, VOCAB_SIZE, Corpus, build_corpus, build_validation, train_tokenizer
from training.loop import Plan, train
from training.models import (
    CHAT_TEMPLATE,
    TEMPERATURE,
    compare,
    judge_experts,
    load,
    make_model,
    save,
    save_tokenizer,
    tell_stories,
)

ASSETS: Final = Path(__file__).resolve().parent.parent / "assets"
HELD_OUT_RULE: Final = 'crc32("name|species|object") divisible by 50'
LEARNING_RATE: Final = 3e-3


@dataclass(frozen=True)
class Sizes:
    """How much of everything. The embedded models are of the default sizes."""

    corpus_tokens: int = 40_000_000
    tokenizer_stories: int = 20_000
    validation_stories: int = 500
    target_steps: int = 7885
    draft_steps: int = 2783
    moe_steps: int = 3300
    batch_tokens: int = 32768
    stories: int = 200  # that are told, for the share that keeps its facts
    new_tokens: int = 1100  # a story that is not over by then has failed


SMOKE: Final = Sizes(200_000, 2_000, 4, 6, 6, 6, 1024, 2, 20)


def main(arguments: list[str] | None = None) -> None:
    args = _parse(arguments)
    sizes, seed, out = SMOKE if args.smoke else Sizes(), args.seed, args.out
    kinds = [args.only] if args.only else ["target", "draft", "moe"]
    directories = {"target": out / "story_model", "draft": out / "story_draft", "moe": out / "story_moe"}
    steps = {"target": sizes.target_steps, "draft": sizes.draft_steps, "moe": sizes.moe_steps}
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.backends.cuda.matmul.allow_tf32 = True

    start = time.monotonic()
    if args.only:
        tokenizer = Tokenizer.from_file(str(ASSETS / "story_model" / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(seed, sizes.tokenizer_stories)
    print(f"tokenizer: {tokenizer.get_vocab_size()} entries, {time.monotonic() - start:.0f} s", flush=True)
    corpus = build_corpus(tokenizer, seed, sizes.corpus_tokens)
    validation = build_validation(tokenizer, seed, sizes.validation_stories)
    size = f"{len(corpus.lengths):,} stories, {len(corpus.tokens):,} tokens"
    print(f"corpus: {size}, {time.monotonic() - start:.0f} s", flush=True)

    figures: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        directories[kind].mkdir(parents=True, exist_ok=True)
        save_tokenizer(tokenizer, directories[kind], None if kind == "draft" else CHAT_TEMPLATE)
        model: Any = make_model(kind, seed).to(device)
        plan = Plan(steps[kind], sizes.batch_tokens, LEARNING_RATE, seed)
        figures[kind] = train(kind, model, corpus, validation, plan, partial(save, model, directories[kind]))

    machine = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if "target" in kinds:
        target, draft = load(directories["target"], device), load(directories["draft"], device)
        report: dict[str, Any] = {
            "seed": seed,
            "corpus": _describe(corpus),
            "vocab_size": VOCAB_SIZE,
            "eos": EOS,
            "eos_id": EOS_ID,
            **machine,
            "target": figures["target"],
            "draft": figures["draft"],
            "validation": {
                **compare(target, draft, validation, device),
                "stories": len(validation.lengths),
                "tokens": len(validation.tokens),
            },
        }
        print(report["validation"], flush=True)
        report["stories"] = _tell(target, directories["target"], sizes, device)
    else:
        report = json.loads((ASSETS / "training.json").read_text(encoding="utf-8"))
    moe = load(directories["moe"], device)
    report["moe"] = {**figures["moe"], **machine, **judge_experts(moe, validation, device)}
    print(report["moe"], flush=True)
    told = _tell(moe, directories["moe"], sizes, device)
    report["moe"]["stories"] = {name: told[name] for name in ("count", "kept", "share", "temperature")}
    (out / "training.json").write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    (out / "README.md").write_text(render_readme(report), encoding="utf-8")
    print(f"{time.monotonic() - start:.0f} s in all", flush=True)


def _tell(model: Any, directory: Path, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """The figures of the stories that a model tells, and some of them."""
    told = tell_stories(model, directory, sizes.stories, sizes.new_tokens, device)
    kept = sum(not story["problems"] for story in told)
    print(f"{directory.name}: {kept} of {len(told)} stories kept their facts", flush=True)
    return {
        "count": len(told),
        "kept": kept,
        "share": kept / len(told),
        "temperature": TEMPERATURE,
        "samples": told[:10],
        "failures": {index: story["problems"] for index, story in enumerate(told) if story["problems"]},
    }


def render_readme(report: dict[str, Any]) -> str:
    """`assets/README.md`: every figure is one of `report`, which stands in `assets/training.json`."""
    samples = report["stories"]["samples"]
    template = Path(__file__).with_name("report.md").read_text(encoding="utf-8")
    text = template.format(**report, sample_count=len(samples))
    for number, sample in enumerate(samples, 1):
        rest = sample["text"][len(sample["opening"]) :]
        verdict = "kept" if not sample["problems"] else "; ".join(sample["problems"])
        text += f"\n### {number}. {sample['tokens']} tokens, {verdict}\n\n*{sample['opening']}*{rest}\n"
    moe = report["moe"]
    shares = [share for layer in moe["expert_shares"] for share in layer]
    template = Path(__file__).with_name("report_moe.md").read_text(encoding="utf-8")
    text += template.format(moe=moe, busiest=max(shares), idlest=min(shares), even=1 / len(moe["expert_shares"][0]))
    return text


def _describe(corpus: Corpus) -> dict[str, Any]:
    lengths = corpus.lengths - 1  # without the end-of-text token
    return {
        "stories": len(lengths),
        "tokens": len(corpus.tokens),
        "shortest": int(lengths.min()),
        "longest": int(lengths.max()),
        "mean": round(float(lengths.mean()), 1),
        "duplicates": corpus.duplicates,
        "too_long": corpus.too_long,
        "held_out_rule": HELD_OUT_RULE,
    }


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the models and the report go")
    parser.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["moe"], help="train this model alone")
    parser.add_argument("--smoke", action="store_true", help="a miniature run of everything")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
