"""Train the embedded model and its draft: corpus, tokenizer, both models, evaluation, report.

On one GPU, within a few minutes: `python -m training.train --out assets --minutes-target 5`.
On a CPU it takes hours; `--smoke` runs the same code on a miniature within a minute or two.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tarfile
import time
from pathlib import Path
from typing import Any, Final

from training.corpus import EOS, EOS_ID, VOCAB_SIZE, Corpus, build_corpus, build_validation, train_tokenizer

HELD_OUT_RULE: Final = 'crc32("name|species|object") divisible by 50'
TARGET_SHARE: Final = 0.75  # of the training time; the draft gets the rest
SMOKE: Final = {
    "tokens": 200_000,
    "tokenizer_stories": 2_000,
    "train_tokens": 5_000,
    "batch_tokens": 1024,
    "validation_stories": 4,
    "stories": 2,
    "new_tokens": 20,
}


def main(arguments: list[str] | None = None) -> None:
    args = _parse(arguments)
    out: Path = args.out
    work: Path = args.work or out / "work"
    directories = {"target": out / "story_model", "draft": out / "story_draft"}
    for directory in (*directories.values(), work):
        directory.mkdir(parents=True, exist_ok=True)

    start = time.monotonic()
    tokenizer = train_tokenizer(args.seed, args.tokenizer_stories)
    print(f"tokenizer: {tokenizer.get_vocab_size()} entries, {time.monotonic() - start:.0f} s", flush=True)
    corpus = build_corpus(tokenizer, args.seed, args.tokens, args.processes)
    validation = build_validation(tokenizer, args.seed, args.validation_stories)
    size = f"{len(corpus.lengths):,} stories, {len(corpus.tokens):,} tokens"
    print(f"corpus: {size}, {time.monotonic() - start:.0f} s", flush=True)

    # Only now, because every worker process of the corpus imports this module.
    import torch
    import transformers

    from training.loop import Plan, train
    from training.models import CHAT_TEMPLATE, TEMPERATURE, compare, load, make_model, save_tokenizer, tell_stories

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.backends.cuda.matmul.allow_tf32 = True
    report: dict[str, Any] = {
        "seed": args.seed,
        "corpus": _describe(corpus),
        "vocab_size": VOCAB_SIZE,
        "eos": EOS,
        "eos_id": EOS_ID,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    for kind, share in (("target", TARGET_SHARE), ("draft", 1 - TARGET_SHARE)):
        plan = Plan(
            max_tokens=args.train_tokens,
            seconds=args.minutes_target * 60 * share,
            batch_tokens=args.batch_tokens,
            learning_rate=args.learning_rate,
            weight_decay=0.1,
            seed=args.seed,
            compile=args.compile and device.type == "cuda",
        )
        model = make_model(kind, args.seed).to(device)
        report[kind] = train(kind, model, corpus, plan, work / f"{kind}.pt", args.resume)
        model.to(torch.bfloat16).save_pretrained(directories[kind])
        save_tokenizer(tokenizer, directories[kind], CHAT_TEMPLATE if kind == "target" else None)
        if args.tars:
            _pack(out, args.tars)

    target, draft = load(directories["target"], device), load(directories["draft"], device)
    report["validation"] = {
        **compare(target, draft, validation, device),
        "stories": len(validation.lengths),
        "tokens": len(validation.tokens),
    }
    print(report["validation"], flush=True)
    told = tell_stories(target, directories["target"], args.stories, args.new_tokens, device)
    kept = sum(not story["problems"] for story in told)
    report["stories"] = {
        "count": len(told),
        "kept": kept,
        "share": kept / len(told),
        "temperature": TEMPERATURE,
        "samples": told[:10],
        "failures": {index: story["problems"] for index, story in enumerate(told) if story["problems"]},
    }
    (out / "training.json").write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    (out / "README.md").write_text(render_readme(report), encoding="utf-8")
    if args.tars:
        _pack(out, args.tars)
    print(f"{kept} of {len(told)} stories kept their facts; {time.monotonic() - start:.0f} s in all", flush=True)


def render_readme(report: dict[str, Any]) -> str:
    """`assets/README.md`: every figure is one of `report`, which stands in `assets/training.json`."""
    samples = report["stories"]["samples"]
    template = Path(__file__).with_name("report.md").read_text(encoding="utf-8")
    text = template.format(**report, sample_count=len(samples))
    for number, sample in enumerate(samples, 1):
        rest = sample["text"][len(sample["opening"]) :]
        verdict = "kept" if not sample["problems"] else "; ".join(sample["problems"])
        text += f"\n### {number}. {sample['tokens']} tokens, {verdict}\n\n*{sample['opening']}*{rest}\n"
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


def _pack(out: Path, directory: Path) -> None:
    """Two archives that together hold everything, because the machine that trains may limit the size of one file."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = out / "story_model" / "model.safetensors"
    with tarfile.open(directory / "target.tar", "w") as tar:
        tar.add(weights, weights.relative_to(out))
    with tarfile.open(directory / "rest.tar", "w") as tar:
        for path in sorted(out.rglob("*")):
            inside = path.relative_to(out)
            if path.is_file() and path != weights and inside.parts[0] != "work":
                tar.add(path, inside)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the models and the report go")
    parser.add_argument("--tars", type=Path, help="also pack the results into two archives here")
    parser.add_argument("--work", type=Path, help="checkpoints go here (default: OUT/work)")
    parser.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    parser.add_argument("--tokens", type=int, default=40_000_000, help="size of the corpus")
    parser.add_argument("--train-tokens", type=int, default=600_000_000, help="at most so many tokens are trained on")
    parser.add_argument("--minutes-target", type=float, default=5.5, help="planned training time of both models")
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--tokenizer-stories", type=int, default=20_000)
    parser.add_argument("--validation-stories", type=int, default=500)
    parser.add_argument("--stories", type=int, default=200, help="stories told for the share that keep their facts")
    parser.add_argument("--new-tokens", type=int, default=1100, help="a story that is not over by then has failed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints in the work directory")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile, on cuda only"
    )
    parser.add_argument("--smoke", action="store_true", help="a miniature run of everything")
    args = parser.parse_args(arguments)
    if args.smoke:
        vars(args).update(SMOKE)
    return args


if __name__ == "__main__":
    main()
