"""Run the notebooks' sources and store their outputs: `python -m tools.docs.notebooks [0 1 ...]` writes *.ipynb.

notebooks/N_*.py (jupytext's percent format) is what people edit and review; the .ipynb beside it is that text with the
outputs of one run. A second run on the same machine differs in timings and in nothing else: cell ids come from the
text, and neither the time of the run nor the versions of Python and jupytext are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat

from tools import ROOT

NOTEBOOKS = ROOT / "notebooks"
CELL_TIMEOUT = 60  # seconds; a cell is meant to take less than half of that on two cores
METADATA = {
    "jupytext": {"cell_metadata_filter": "-all", "notebook_metadata_filter": "-all"},
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def sources(numbers: list[int] | None = None) -> list[Path]:
    """The notebooks' .py files in order. Raises ValueError for a number that no notebook has."""
    found = {int(path.name.split("_")[0]): path for path in NOTEBOOKS.glob("[0-9]*_*.py")}
    missing = set(numbers or []) - found.keys()
    if missing:
        raise ValueError(f"there is no notebook {min(missing)}; there are {', '.join(map(str, sorted(found)))}")
    return [found[number] for number in sorted(numbers or found)]


def as_text(notebook: Any) -> str:
    """A notebook as the text of its .py file, without outputs."""
    text: str = jupytext.writes(notebook, fmt="py:percent")
    return text


def from_source(path: Path) -> Any:
    """The .py file as a notebook without outputs. Cell ids depend only on the text."""
    notebook = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def execute(notebook: Any) -> Any:
    """Run every cell with this very Python, in the notebooks' directory, and store the outputs in `notebook`."""
    from nbclient import NotebookClient

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as fast as two on a model this small
    # The kernel inherits the environment, and must find a source tree that is not installed
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(NOTEBOOKS)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    notebook.metadata = nbformat.from_dict(METADATA)  # the kernel reports its version, which is not the notebook's
    return notebook


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.docs.notebooks", description="Run notebooks/*.py into *.ipynb."
    )
    parser.add_argument("numbers", nargs="*", type=int, metavar="N", help="only these notebooks")
    try:
        paths = sources(parser.parse_args(argv).numbers)
    except ValueError as error:
        parser.error(str(error))
    for path in paths:
        notebook = execute(from_source(path))
        target = path.with_suffix(".ipynb")
        nbformat.write(notebook, target)
        print(f"{target.relative_to(ROOT)}: {len(notebook.cells)} cells, {target.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
