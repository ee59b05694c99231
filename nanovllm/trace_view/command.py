"""`nanovllm trace view run.jsonl` writes run.html. Loads neither torch nor a model."""

import argparse
from pathlib import Path

from nanovllm.trace_view.page import page
from nanovllm.trace_view.recording import Recording


def add_trace_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    view = commands.add_parser("view", help="write one HTML page with a scrubber over the steps")
    view.add_argument("recording", type=Path, help="a file that Recording.save wrote")
    view.add_argument("--out", type=Path, help="what to write (default: the recording's name with .html)")
    view.add_argument("--tokenizer", type=Path, help="tokenizer.json, or its directory: show text, not token ids")
    view.set_defaults(run=run_view)


def run_view(args: argparse.Namespace) -> None:
    decode = None
    if args.tokenizer is not None:
        from tokenizers import Tokenizer

        file = args.tokenizer / "tokenizer.json" if args.tokenizer.is_dir() else args.tokenizer
        if not file.is_file():
            raise ValueError(f"--tokenizer {args.tokenizer}: there is no such file, and no tokenizer.json in it")
        decode = Tokenizer.from_file(str(file)).decode
    out = args.out or args.recording.with_suffix(".html")
    out.write_text(page(Recording.load(args.recording), decode), encoding="utf-8")
    print(out)
