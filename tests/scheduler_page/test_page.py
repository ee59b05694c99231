"""The page as a file: it loads nothing, finds what it asks for, and holds all that its Python needs."""

import html.parser
import io
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from nanovllm.simulate.routers import ROUTERS
from tools.exercises.exercises import find_holes
from tools.scheduler_page import build, pyodide
from tools.scheduler_page.fleet import FleetSetup, play_fleet
from tools.scheduler_page.in_browser import EDITOR, MOST_LINES, STAGE_5, Endless, bounded

ROOT = build.ROOT
STAGE = (ROOT / STAGE_5).read_text(encoding="utf-8")


class Parts(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.addresses += [values[name] for name in ("src", "href", "action", "data") if name in values]
        self.ids += [values["id"]] if "id" in values else []


def test_the_page_loads_nothing_and_its_script_finds_all_that_it_asks_for() -> None:
    text = build.page({})
    parts = Parts(text)
    assert parts.addresses == ["data:,"] and "{{" not in text
    assert not re.search(r"@import|url\(|XMLHttpRequest|WebSocket|sendBeacon|fetch\((?!\"data:)", text)
    asked = set(re.findall(r'\$\("([\w-]+)"\)', build.read("page.js") + build.read("fleet.js")))
    assert len(asked) > 20 and asked <= set(parts.ids) and len(set(parts.ids)) == len(parts.ids)


def test_the_same_sources_give_the_same_page() -> None:
    assert build.page({"a": b"1"}) == build.page({"a": b"1"})


# --- the Python side, from the page's own sources, without any package ------------------------------------------------


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """ask(questions) -> answers, from a Python that has the page's zip file and no package."""
    directory = tmp_path_factory.mktemp("browser")
    zipfile.ZipFile(io.BytesIO(build.sources())).extractall(directory)
    program = (
        "import json, sys; sys.path.insert(0, '')\n"
        "from tools.scheduler_page import in_browser; in_browser.install()\n"
        "print(json.dumps([json.loads(in_browser.respond(json.dumps(q))) for q in json.load(sys.stdin)]))"
    )

    def answers(*questions: dict[str, Any]) -> list[Any]:
        # -I -S: neither this environment's packages nor its paths
        command = [sys.executable, "-I", "-S", "-c", program]
        asked = json.dumps(questions)
        done = subprocess.run(command, input=asked, capture_output=True, text=True, cwd=directory, timeout=60)
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout))

    return answers


def test_without_torch_and_xxhash_the_scheduler_decides_as_it_does_with_them(ask: Any) -> None:
    scenes = build.scenes()
    live = ask(*({"do": "play", "setup": {k: v for k, v in scene.items() if k != "run"}} for scene in scenes))
    assert live == json.loads(json.dumps([scene["run"] for scene in scenes]))


def test_without_torch_and_xxhash_the_routers_decide_as_they_do_with_them(ask: Any) -> None:
    few: dict[str, Any] = {"replicas": 3, "rate": 25, "shared": 80, "beginnings": 3, "num_blocks": 64, "seats": 4}
    setups = [few | {"router": router} for router in ROUTERS]
    answers = dict(zip(ROUTERS, ask(*({"do": "fleet", "setup": setup} for setup in setups)), strict=True))
    runs = {setup["router"]: json.loads(json.dumps(play_fleet(FleetSetup.parse(setup)))) for setup in setups}
    ours, theirs = answers.pop("sessions"), runs.pop("sessions")  # another hash, and so other places on its ring
    assert answers == runs and ours["totals"]["requests"] == theirs["totals"]["requests"] > 20


def test_the_readers_scheduler_is_tested_and_moves_the_picture(ask: Any) -> None:
    [hello] = ask({"do": "hello"})
    ours, holes = hello["ours"], hello["holes"]
    names = [hole.name for hole in find_holes(STAGE)]
    assert names and all(f"exercise {name}" in holes for name in names) and "NotImplementedError" not in ours
    endless = ours.replace("self.preempt(victim)", "pass")
    backwards = ours.replace("victim = self.running[-1]", "victim = self.running[0]")
    broken = ours.replace("self.trace.step += 1", "self.trace.step += one")
    codes = {
        "ours": ours,
        "holes": holes,
        "endless": endless,
        "backwards": backwards,
        "broken": broken,
        "typo": "class",
    }
    setup = build.scenes()[0]
    plays = dict(zip(codes, ask(*({"do": "play", "setup": setup, "code": c} for c in codes.values())), strict=True))
    tests = dict(zip(codes, ask(*({"do": "test", "code": c} for c in codes.values())), strict=True))

    def messages(code: str) -> str:
        return "\n".join(test["message"] for test in tests[code]["tests"])

    assert all(test["passed"] for test in tests["ours"]["tests"]) and len(tests["ours"]["tests"]) >= 8
    assert plays["ours"]["error"] is None and plays["ours"]["totals"]["tokens"] == 48
    assert "still open: exercise 5.2" in messages("holes") and "still open: exercise 5.2" in plays["holes"]["error"]
    assert "expected r.step() == {0: 1}, but got {1: 1}" in messages("backwards")
    victims = [e["request"] for e in plays["backwards"]["events"] if e["type"] == "preempted"]
    assert victims[0] == "A" and len(plays["backwards"]["frames"]) > 1
    line = 1 + ours.splitlines().index("        while not self.allocate(seq, num_tokens):")
    stuck = re.compile(
        rf"line ({line}|{line + 1}|{line + 2}|{line + 3}): make_room\(\) does not end; {MOST_LINES:,} lines"
    )
    assert stuck.match(plays["endless"]["error"]) and stuck.search(messages("endless"))
    line = 1 + broken.splitlines().index("        self.trace.step += one")
    assert plays["broken"]["error"] == f"line {line}: NameError: name 'one' is not defined"
    assert plays["typo"]["frames"] == [] and plays["typo"]["error"].startswith("line 1: SyntaxError")


def test_of_two_functions_the_one_with_the_endless_loop_is_named() -> None:
    code = "def inner():\n" + "    x = 1\n" * 20 + "def outer():\n    while True:\n        inner()\n"
    names: dict[str, Any] = {}
    exec(compile(code, EDITOR, "exec"), names)
    with pytest.raises(Endless, match=r"^line 2[34]: outer\(\) does not end"), bounded():
        names["outer"]()


# --- Pyodide ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return tmp_path


def fake_npm(cache: Path, script: str) -> None:
    npm = cache / "bin" / "npm"
    npm.write_text(f"#!{sys.executable}\nimport sys\n{script}")
    npm.chmod(0o755)


def test_without_npm_or_network_the_page_has_the_recorded_runs_and_says_so(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for script, reason in (("", "npm is not installed"), ("sys.exit('npm error network')", "npm error network")):
        if script:
            fake_npm(cache, script)
        path = build.write(cache / "out")
        assert '<script type="application/json" id="assets">{}</script>' in path.read_text(encoding="utf-8")
        assert reason in capsys.readouterr().err
        assert not list((cache / "cache").glob("*.tgz"))


def test_an_archive_with_another_hash_is_refused(cache: Path) -> None:
    fake_npm(cache, "open(sys.argv[-1] + '/pyodide.tgz', 'wb').write(b'something else')")
    with pytest.raises(pyodide.PyodideError, match="whose hash is not sha512-"):
        pyodide.fetch()
    assert list((cache / "cache").iterdir()) == []


def test_what_is_there_is_not_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npm(cache, "open(sys.argv[-1] + '/pyodide.tgz', 'wb').write(b'')")
    empty = "sha512-z4PhNX7vuL3xVChQ1m2AB9Yg5AULVxXcg/SpIdNs6c5H0NE8XYXysP+DGNKHfuwvY7kxvUdBeoGlODJ6+SfaPg=="
    monkeypatch.setattr(pyodide, "INTEGRITY", empty)
    assert pyodide.fetch() == pyodide.archive()
    shutil.rmtree(cache / "bin")
    assert pyodide.fetch().read_bytes() == b""
    pyodide.archive().write_bytes(b"damaged")
    with pytest.raises(pyodide.PyodideError, match="npm is not installed"):
        pyodide.fetch()
