"""Kernels by themselves. Their benchmarks share a record that grows row by row."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import harness

Rows = Iterable[dict[str, Any]]


def record(
    module: str,
    doc: str | None,
    name: str,
    measure: Callable[[], tuple[dict[str, Any], Rows]],
    say: Callable[[Any], str],
) -> None:
    """The command `python -m benchmarks.kernels.MODULE`. Writes NAME.CARD.json: what `measure` tells of the machine,
    the commit, and the rows. It is written after each row: a run that is cut short keeps its rows.

    say: puts a row into words, for the terminal. Exits with one line and status 2 if there is no GPU.
    """
    parser = harness.make_parser(f"kernels.{module}", doc)
    parser.add_argument("--out", type=Path, required=True, help="directory for the JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and this machine has none")
    path = harness.result_path(name, torch.cuda.get_device_name(), options.out)
    with torch.inference_mode():
        about, rows = measure()
        result = about | {"commit": harness.commit(), "rows": []}
        for row in rows:
            print(say(row), flush=True)
            result["rows"].append(row)
            harness.write_json(result, path)
