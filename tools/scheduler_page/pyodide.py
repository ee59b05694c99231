"""Fetch Pyodide, CPython for the browser, once: `make pyodide`. It is kept beside the models and never committed.

npm packs one version, whose hash is checked whenever it is read. Pyodide is under the MPL 2.0, CPython under the PSF
license; the page that contains them says so.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tools import cache

VERSION = "0.29.5"
INTEGRITY = "sha512-TkYrUv9m8QmfImADKRmpwZulL48E0uUaBSO+dvRQKyAJc0qh9gu7jn8btyHPh3NZm1r2IH2YrJhIr7Q2B9urAw=="
LOCK = "pyodide-lock.json"
FILES = "pyodide.js", "pyodide.asm.js", "pyodide.asm.wasm", "python_stdlib.zip", LOCK


class PyodideError(RuntimeError):
    """There is no Pyodide; the message is one line and names the remedy."""


def archive() -> Path:
    """Where the archive is kept; it need not be there yet."""
    return cache() / f"pyodide-{VERSION}.tgz"


def is_sound(path: Path) -> bool:
    if not path.is_file():
        return False
    return "sha512-" + base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode() == INTEGRITY


def fetch() -> Path:
    """The archive, from the cache or from wherever npm is configured to look. Raises PyodideError."""
    target = archive()
    if is_sound(target):
        return target
    npm = shutil.which("npm")
    if npm is None:
        raise PyodideError(f"npm is not installed; install Node.js, or copy {target} from a machine that has it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pyodide-", dir=target.parent) as work:
        command = [npm, "pack", f"pyodide@{VERSION}", "--silent", "--pack-destination", work]
        done = subprocess.run(command, capture_output=True, text=True, cwd=work)
        found = next(Path(work).glob("*.tgz"), None)
        if done.returncode != 0 or found is None:
            reason = (done.stderr.strip().splitlines() or ["npm gave no reason"])[-1]
            raise PyodideError(
                f"could not fetch pyodide@{VERSION} ({reason}): this step needs the network; or copy {target} from a "
                "machine that has it"
            )
        if not is_sound(found):
            raise PyodideError(f"npm brought a pyodide@{VERSION} whose hash is not {INTEGRITY}; check npm's registry")
        found.replace(target)
    return target


def files() -> dict[str, bytes]:
    """What the page needs of the archive by name. Its lock file lists no package. Raises PyodideError."""
    with tarfile.open(fetch()) as packed:
        found = {name: packed.extractfile(f"package/{name}") for name in FILES}
        content = {name: file.read() for name, file in found.items() if file is not None}
    content[LOCK] = json.dumps({"info": json.loads(content[LOCK])["info"], "packages": {}}).encode()
    return content


def main() -> int:
    try:
        print(f"Pyodide {VERSION} is in {fetch()}")
    except PyodideError as error:
        print(f"make pyodide: {error}", file=sys.stderr)
        return 0 if shutil.which("npm") is None else 1  # without npm the page does without Pyodide, and so do its tests
    return 0


if __name__ == "__main__":
    sys.exit(main())
