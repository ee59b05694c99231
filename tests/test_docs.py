"""The site builds without a warning, loads nothing from elsewhere, and no link inside it leads nowhere."""

import html.parser
import re
import runpy
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from benchmarks.lib import tables
from stages.manifest import load_stages
from tests.state_arrows import START, Arrow, block_arrows, sequence_arrows
from tools.docs import build
from tools.docs.build import ROOT, Site, diagram, filled

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}


class Page(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if LOADED.get(tag) in values:
            self.loaded.append(values[LOADED[tag]])
        elif tag == "a" and "href" in values:
            self.links.append(values["href"])


def complaints(site: Path) -> Iterator[str]:
    """What a page or a style sheet loads from elsewhere, and links inside the site that lead nowhere."""
    # What the theme keeps under _static with that ending is no page but a template.
    paths = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in paths}
    for path, page in pages.items():
        for address in page.loaded + page.links:
            parts = urlsplit(address)
            outside = bool(parts.netloc or parts.scheme)
            if outside:
                if address in page.loaded and parts.scheme != "data":
                    yield f"{path.name} loads {address}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                yield f"{path.name} points at {address}"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                yield f"{path.name} points at {address}, and there is no such place on that page"
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        yield from (
            f"{path.name} loads {u}" for u in re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^)\"']+)", text)
        )


def test_links_into_the_repository_become_links_on_the_site() -> None:
    text = "[a](../nanovllm/engine/scheduler.py), [b](../notebooks/5_continuous_batching.ipynb), [c](server.md)"
    text += ", [d](../docs/afternoon.md)"
    expected = "[a](/source/nanovllm/engine/scheduler.md), [b](/notebooks/5_continuous_batching.ipynb), [c](server.md)"
    expected += ", [d](/afternoon.md)"
    site = Site()
    assert site.linked(text) == expected
    assert site.linked("[x](../examples/cluster.sh)") == "[x](/source/examples/cluster.md)"
    for wrong, complaint in (("nanovllm/no_such.py", "no such file"), ("pyproject.toml", "not on the site")):
        with pytest.raises(ValueError, match=complaint):
            site.linked(f"[x](../{wrong})")


def test_a_file_that_is_named_is_linked_and_gets_a_page() -> None:
    site = Site()
    assert "tests/oracle.py" not in site.sources
    text = "`tests/oracle.py`, [`stages/core.py`](x.md), `stages/no_such.py`, `stages/`"
    linked = "[`tests/oracle.py`](/source/tests/oracle.md), [`stages/core.py`](x.md), `stages/no_such.py`, `stages/`"
    assert site.linked(text) == linked
    assert "tests/oracle.py" in site.sources


def test_pictures_of_a_notebook_get_words() -> None:
    outputs = [
        {
            "output_type": "display_data",
            "data": {"image/png": "AA=="},
            "metadata": {"image/png": {"alt": "Who runs when"}},
        }
    ]
    cells: list[dict[str, Any]] = [{"cell_type": "code", "source": "print(1)", "metadata": {}, "outputs": outputs}]
    cells.append(cells[0] | {"metadata": {}, "outputs": [{"data": {"image/png": "AA=="}}]})
    code, mute = Site().notebook({"cells": cells})["cells"]
    assert code["metadata"]["tags"] == mute["metadata"]["tags"] == ["hide-input"]
    assert code["metadata"]["mystnb"]["image"]["alt"] == "Who runs when"
    assert "picture" in mute["metadata"]["mystnb"]["image"]["alt"]


def test_code_that_imports_or_draws_is_folded_and_other_code_is_not() -> None:
    def cell(*outputs: dict[str, Any]) -> dict[str, Any]:
        return {"cell_type": "code", "source": "x", "metadata": {}, "outputs": list(outputs)}

    drawn = {"output_type": "display_data", "data": {"image/png": "AA=="}}
    printed = {"output_type": "stream", "text": "1"}
    found = Site().notebook({"cells": [cell(), cell(), cell(printed), cell(printed, drawn)]})["cells"]
    assert [cell["metadata"].get("tags") for cell in found] == [["hide-input"], None, None, ["hide-input"]]


def test_a_docstring_is_prose_with_its_columns_as_they_stand() -> None:
    docs = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    lines = [
        "What *it* does, with",
        "`a_name` and ids_.",
        "",
        "temperature: 0 is",
        "    greedy.",
        "top_p, top_k: a share.",
    ]
    lines += ["", "kind    what", "token   ids", "", "    llm = LLM()"]
    docs["as_prose"](None, "", "", None, None, lines)
    assert lines == [
        *(r"What \*it\* does, with ``a_name`` and ids\_.", "", "- **temperature**: 0 is greedy.", ""),
        *("- **top_p, top_k**: a share.", "", ".. code-block:: text", "", "   kind    what", "   token   ids", ""),
        *(".. code-block:: text", "", "   llm = LLM()", ""),
    ]


def test_every_page_links_to_what_there_is_and_is_in_the_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        Site().linked(filled(page.read_text(encoding="utf-8")))
        assert page.stem == "index" or re.search(rf"^{page.stem}$", index, re.MULTILINE), page.name


def test_every_make_target_that_a_page_names_is_there() -> None:
    targets = set(re.findall(r"^([a-z][\w%-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"`!?make ([a-z][\w-]*)", page.read_text(encoding="utf-8")):
            assert re.sub(r"\d+", "%", name) in targets, f"{page.name} names make {name}"


def test_the_glossary_is_in_order() -> None:
    terms = re.findall(r"^(\S.*)\n: ", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(terms) > 10 and terms == sorted(terms, key=str.lower)


def test_every_stage_of_the_manifest_has_a_chapter_a_row_and_a_term() -> None:
    index = filled((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    for stage in load_stages():
        chapter = f"../notebooks/{stage.number}_{stage.slug}.ipynb"
        assert (ROOT / "docs" / chapter).is_file()
        assert f"[{stage.number}. {stage.title}]({chapter})" in index
        assert f"]({chapter})" in glossary, f"no term leads to {chapter}"


def test_every_target_of_the_makefile_is_on_the_page_of_commands() -> None:
    targets = re.findall(r"^([a-z][\w%-]*):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    page = build.commands_page()
    assert len(targets) > 20
    for name in targets:
        assert f"| `make {name.replace('%', 'N')}` |" in page
    assert "trace" in page.split("## nanovllm")[1]


def test_the_page_of_the_api_has_every_name_of_the_package_and_every_engine() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^\.\. auto(?:class|function):: (.+)\.(\w+)$", page, re.MULTILINE)
    assert all(hasattr(import_module(module), name) for module, name in named)
    assert {("nanovllm", name) for name in ("LLM", "AsyncLLM", "SamplingParams", "RequestOutput")} <= set(named)
    assert {(f"stages.{stage.module_name}", stage.class_name) for stage in load_stages()} <= set(named)


def test_results_have_a_table_of_every_stage_that_was_measured() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for path in (ROOT / "benchmarks" / "results").glob("stage_*.json"):
        assert f"<!-- generated: {path.stem} -->\n| {tables.load(path.stem, path.parent)['title']} |" in page


def test_short_formulas_are_spelled_out() -> None:
    text = r"with $\min(1, p(x)/q(x))$, or $1 + a^{k+1} - b^2$; `$HOME` and `$(which python)` stay"
    [cell] = Site().notebook({"cells": [{"cell_type": "markdown", "source": text}]})["cells"]
    assert cell["source"] == (
        "with min(1, <i>p</i>(<i>x</i>)/<i>q</i>(<i>x</i>)), "
        "or 1 + <i>a</i><sup><i>k</i>+1</sup> − <i>b</i><sup>2</sup>; "
        "`$HOME` and `$(which python)` stay"
    )
    with pytest.raises(ValueError, match="cannot show"):
        build.formula(r"\frac{1}{2}")


@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "docs" / "figures").glob("*.svg"))])
def test_diagrams_can_be_read_to_somebody_and_hold_no_empty_line(name: str) -> None:
    svg = diagram(name)
    assert re.search(r'aria-label="[^"]{20,}"', svg) and "\n\n" not in svg
    assert ElementTree.fromstring(svg) is not None
    for page in re.findall(r'href="source/(.+?)\.html"', svg):
        assert (ROOT / f"{page}.py").is_file(), f"the diagram {name} links to {page}"


def drawn_arrows(svg: ElementTree.Element) -> Iterator[tuple[str, str, str]]:
    """The arrows of a drawing: the box that each leaves, the one that it reaches, and its label, which comes next."""
    boxes: dict[str, tuple[float, ...]] = {}
    corners: tuple[float, ...] = ()
    ends: list[str] = []
    for element in svg:
        if element.get("class") == "box":
            x, y, width, height = (float(element.get(name, "")) for name in ("x", "y", "width", "height"))
            corners = x, y, x + width, y + height
        elif element.get("class") == "arrow":
            x1, y1, x2, y2 = map(float, element.get("d", "").removeprefix("M").split())
            near = [
                {n: max(a - x, x - c, b - y, y - d) for n, (a, b, c, d) in boxes.items()}
                for x, y in ((x1, y1), (x2, y2))
            ]
            ends = [min(distance, key=distance.__getitem__) for distance in near]
            assert all(min(distance.values()) < 4 for distance in near), "an arrow ends in the middle of nowhere"
        elif element.get("class") == "label":
            yield ends[0], ends[1], element.text or ""
        elif element.tag == "text":  # of the box before it, a line
            name = next((n for n, place in boxes.items() if place == corners), "")
            boxes.pop(name, None)
            boxes[f"{name} {element.text}".strip()] = corners


@pytest.mark.parametrize(
    ("name", "arrows"), [("sequence", sequence_arrows), ("block", block_arrows)], ids=["sequence", "block"]
)
def test_the_states_that_are_drawn_are_those_of_the_code(name: str, arrows: Callable[[], set[Arrow]]) -> None:
    """The picture, and the sentence that is read to somebody who does not see it."""
    labels: dict[tuple[str, str], list[str]] = {}
    for start, end, label in sorted(arrows()):
        if START not in (start, end):
            labels.setdefault((start, end), []).append(label.removeprefix("finished "))
    expected = [(start, end, ", ".join(words)) for (start, end), words in labels.items()]
    [svg] = ElementTree.fromstring(diagram(name))
    assert sorted(drawn_arrows(svg)) == expected
    spoken = "; ".join(f"{start} to {end} ({text})" for start, end, text in expected)
    assert svg.get("aria-label", "").split(": ")[1] == spoken


def test_the_check_bites(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<script src="https://cdn.example/x.js"></script><img src="no.png"><a href="b.html#here">b</a>'
        '<a href="b.html#there">b</a><a href="https://fine.example">c</a><img src="data:image/png;base64,AA==">'
    )
    (tmp_path / "b.html").write_text('<p id="here">')
    (tmp_path / "a.css").write_text('@import "//fonts.example/x"; a { background: url(https://e.example/y) }')
    found = sorted(complaints(tmp_path))
    assert [line.split()[-1] for line in found if "loads" in line] == [
        "//fonts.example/x", "https://e.example/y", "https://cdn.example/x.js",
    ]  # fmt: skip
    assert [line for line in found if "points" in line] == [
        "a.html points at b.html#there, and there is no such place on that page", "a.html points at no.png",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("sphinx_book_theme") is None, reason="the extras `docs` and `notebooks` are not installed"
)
def test_the_site(tmp_path: Path) -> None:
    assert build.main(["--out", str(tmp_path)]) == 0
    assert (tmp_path / "html" / "notebooks" / "4_prefix_caching.html").exists()
    assert list(complaints(tmp_path / "html")) == []
    pages = {path.stem for path in (tmp_path / "source" / "extra").glob("*.html")}
    assert not pages & {path.stem for path in (ROOT / "docs").glob("*.md")}, "one of them hides the other"
    front = (tmp_path / "html" / "index.html").read_text(encoding="utf-8")
    assert all(f'href="{name}.html"' in front for name in (*pages, "lectures/index"))
    api = (tmp_path / "html" / "api.html").read_text(encoding="utf-8")
    assert all(f'id="nanovllm.{name}"' in api for name in ("LLM", "LLM.generate", "SamplingParams"))
    for page in (tmp_path / "html").rglob("*.html"):
        if "_static" not in page.parts:
            text = re.sub(r"<script.*?</script>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
            pictures = re.findall(r"<img[^>]*>", text)
            assert all(re.search(r'\balt="[^"]*\w{3}', tag) and '.png" src' not in tag for tag in pictures), page
