"""Make `.venv` ready: `make setup` runs this with the Python from which the environment is made.

    python3 tools/setup_env.py [--torch "torch==2.13.0"] [--system-site]
    .venv/bin/python tools/setup_env.py --extras docs notebooks

Without `--system-site` everything is installed into `.venv`: first torch exactly as asked for, then the project with
the extras below. With it, whatever this Python already has (a CUDA torch above all) is reused, only what is missing is
installed, and a machine without network works with what there is. `.venv/setup.json` remembers how the environment
was made, so that doing it again costs nothing. `--extras` adds what these extras need and the environment lacks.
Needs only the standard library, and the network only where something is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
RECORD = VENV / "setup.json"
REUSE = "base_packages.pth"
EXTRAS = ("dev", "notebooks", "models", "serve")
SUPPORTED = ((3, 11), (3, 13))

# Runs inside .venv: the requirements (one an argument) that its packages do not meet.
FIND_MISSING = """
import importlib.metadata as metadata, sys
try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement
for text in sys.argv[1:]:
    requirement = Requirement(text)
    if requirement.marker is None or requirement.marker.evaluate():
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = None
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            print(text)
"""
# Runs inside .venv: name==version of those packages that are there.
FIND_VERSIONS = """
import importlib.metadata as metadata, sys
for name in sys.argv[1:]:
    try:
        print(f"{name}=={metadata.version(name)}")
    except metadata.PackageNotFoundError:
        pass
"""


def python_in_venv() -> Path:
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def ask(code: str, *arguments: str) -> str:
    """What this Python code prints in `.venv`."""
    command = [str(python_in_venv()), "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def pip_install(*arguments: str | Path) -> bool:
    command = [python_in_venv(), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    return subprocess.run([str(part) for part in command], cwd=ROOT).returncode == 0


def reuse_of_this_python() -> str:
    """The text of a .pth file by which `.venv` finds the packages of this Python.

    `venv --system-site-packages` would show the packages of the Python *below* a virtual environment, never those of
    the environment itself, which is where a CUDA torch usually lies. `addsitedir` (rather than a plain path) honours
    the .pth files of those directories as well.
    """
    named = (Path(entry) for entry in sys.path if entry)
    directories = [path for path in named if path.name in ("site-packages", "dist-packages") and path.is_dir()]
    return "".join(f"import site; site.addsitedir({str(path)!r})\n" for path in directories)


def reuse_of_venv() -> str | None:
    """The text of that file in `.venv`. None if `.venv` reuses no other Python, or does not exist."""
    pth = site_packages() / REUSE if python_in_venv().exists() else None
    return pth.read_text() if pth and pth.exists() else None


def create(reuse: str | None) -> None:
    print(f"making {VENV.name} with Python {sys.version.split()[0]}", flush=True)
    # A reused pip is there at once, and a Python of Debian may have no ensurepip
    with_pip = reuse is None or find_spec("pip") is None
    venv.create(VENV, with_pip=with_pip, clear=True, symlinks=os.name != "nt")
    if reuse is not None:
        (site_packages() / REUSE).write_text(reuse)


def site_packages() -> Path:
    return Path(ask("import sysconfig; print(sysconfig.get_path('purelib'))"))


def requirements(extras: Sequence[str] = ()) -> list[str]:
    """The requirements of these extras, or without any the project's own. Raises KeyError for an unknown extra."""
    import tomllib  # here, so that an older Python gets as far as the message that it is too old

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [line for name in extras for line in project["optional-dependencies"][name]] or project["dependencies"]


def cpu_only(torch: str) -> str:
    """The command that sets up with the build of torch for CPUs, a tenth of the size."""
    return f'make setup TORCH="{torch} --index-url https://download.pytorch.org/whl/cpu"'


def install_everything(torch: str) -> None:
    print(f"installing {torch}, then the project and its tools: some minutes", flush=True)
    if sys.platform == "linux" and "index-url" not in torch:
        print(f"on Linux that may be PyTorch for CUDA, several GB; for a CPU alone:\n    {cpu_only(torch)}", flush=True)
    if not (pip_install(*shlex.split(torch)) and pip_install("-e", f".[{','.join(EXTRAS)}]")):
        sys.exit("setup: pip failed, see above; once its complaint is met, `make clean` and `make setup` start afresh")


def add_missing(wanted: list[str]) -> list[str]:
    """Install those requirements that `.venv` does not meet. Returns what is still missing.

    Torch is never replaced, and neither is a triton that came with it. A build of torch for CPUs brings no triton, so
    one is installed.
    """
    missing = ask(FIND_MISSING, *wanted).splitlines()
    found = ask(FIND_VERSIONS, "torch", "triton")
    kept = ("torch", "triton") if "triton==" in found else ("torch",)
    if to_install := [line for line in missing if not line.startswith(kept)]:
        print("installing what is missing:", ", ".join(to_install), flush=True)
        pins = VENV / "reused.txt"
        pins.write_text(found)
        pip_install("--quiet", "--retries", "1", "--timeout", "15", "--constraint", pins, *to_install)
        missing = ask(FIND_MISSING, *wanted).splitlines()
    return missing


def install_missing() -> None:
    """Add to a reused installation only what it lacks."""
    if still := add_missing(requirements()):
        sys.exit(f"setup: {sys.executable} lacks these, and they could not be installed: {', '.join(still)}")
    if still := add_missing(requirements(EXTRAS)):
        print(f"setup: going on without {', '.join(still)}: the targets that use them will say so")
    (site_packages() / "a_nanovllm.pth").write_text(f"{ROOT}\n")  # its name sorts first, so its packages come first
    if find_spec("setuptools"):  # writes the `nanovllm` script; with too old a setuptools there is none
        pip_install("--quiet", "--quiet", "--quiet", "--no-deps", "--no-build-isolation", "--editable", ".")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch", default="torch==2.13.0", help="arguments for the pip install that brings torch")
    parser.add_argument("--system-site", action="store_true", help="reuse the packages that this Python has")
    parser.add_argument("--extras", nargs="+", metavar="NAME", help="only add what these extras of the project need")
    options = parser.parse_args()
    if not SUPPORTED[0] <= sys.version_info[:2] <= SUPPORTED[1]:
        version = sys.version.split()[0]
        sys.exit(f"setup: needs Python 3.11 to 3.13 and {sys.executable} is {version}: pass PYTHON=python3.12, say")

    if options.system_site and find_spec("torch") is None:
        sys.exit(f"setup: SYSTEM_SITE=1 reuses the torch of {sys.executable}, which has none; leave SYSTEM_SITE out")

    if options.extras:
        if still := add_missing(requirements(options.extras)):
            sys.exit(f"setup: not installed, and could not be (is there a network?): {', '.join(still)}")
        return
    started = time.monotonic()
    found = reuse_of_venv()
    # An environment that reuses another Python goes on doing so when only pyproject.toml has changed.
    reuse = reuse_of_this_python() if options.system_site else found
    pyproject = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    wanted = {"torch": options.torch, "reuse": reuse, "pyproject": pyproject}
    if RECORD.exists() and json.loads(RECORD.read_text()) == wanted and python_in_venv().exists():
        RECORD.touch()
        print(f"{VENV.name} is up to date")
        return
    if reuse != found or not python_in_venv().exists():
        create(reuse)
    if reuse is None:
        install_everything(options.torch)
    else:
        install_missing()
    RECORD.write_text(json.dumps(wanted, indent=2) + "\n")
    print(f"{VENV.name} is ready after {time.monotonic() - started:.0f} s: {ask(FIND_VERSIONS, 'torch')}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nsetup: called off; `make setup` goes on", file=sys.stderr)
        sys.exit(130)
