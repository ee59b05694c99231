"""The plugin by which CI fails where a test is skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import ROOT

ONE = "import pytest\n\n@pytest.mark.skip(reason='no moon')\ndef test_a():\n    pass\n\ndef test_b():\n    pass\n"
WHOLE = "import pytest\n\npytest.skip('no stars', allow_module_level=True)\n"
PASSES = "def test_c():\n    pass\n"


@pytest.mark.slow
@pytest.mark.parametrize("share", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_whatever_is_skipped_is_named_and_fails_the_run(share: list[str], tmp_path: Path) -> None:
    texts = {"test_one.py": ONE, "test_whole.py": WHOLE, "test_passes.py": PASSES}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.no_skips",
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
        "-p",
        "no:nbval",
        "-p",
        "no:schemathesis",
        *share,
    ]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "2 passed" in done.stdout
    assert "test_one.py::test_a: no moon" in done.stdout and "test_whole.py: no stars" in done.stdout
    done = subprocess.run([*command, str(tmp_path / "test_passes.py")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "nothing should be" not in done.stdout
