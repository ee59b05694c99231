"""Kernels by themselves. Their benchmarks share a record that grows row by row."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import harness


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, with those that all have. Exits with one line and status 2 if there is no GPU."""
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--commit", help="the commit that is measured, where there is no git")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and this machine has none")
    return options


def record(
    rows: Iterable[dict[str, Any]], about: dict[str, Any], options: argparse.Namespace, say: Callable[[Any], str]
) -> None:
    """Write `about`, the commit and the rows, after each row: a run that is cut short keeps its rows.

    say: puts a row into words, for the terminal.
    """
    result = about | {"commit": harness.commit(told=options.commit), "rows": []}
    for row in rows:
        print(say(row), flush=True)
        result["rows"].append(row)
        harness.write_json(result, options.out)
