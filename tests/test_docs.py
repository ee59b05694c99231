"""The site builds without a warning, loads nothing from elsewhere, and no link inside it leads nowhere."""

import html.parser
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tools import docs
from tools.docs import ROOT, on_the_site

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
    expected = "[a](/source/nanovllm/engine/scheduler.md), [b](/notebooks/5_continuous_batching.ipynb), [c](server.md)"
    assert on_the_site(text) == expected
    for wrong, complaint in (("nanovllm/no_such.py", "no such file"), ("tests/conftest.py", "not on the site")):
        with pytest.raises(ValueError, match=complaint):
            on_the_site(f"[x](../{wrong})")


def test_every_page_links_to_what_there_is_and_is_in_the_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        on_the_site(page.read_text(encoding="utf-8"))
        assert page.stem == "index" or re.search(rf"^{page.stem}$", index, re.MULTILINE), page.name


def test_every_make_target_that_a_page_names_is_there() -> None:
    targets = set(re.findall(r"^([a-z][\w%-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"`!?make ([a-z][\w-]*)", page.read_text(encoding="utf-8")):
            assert re.sub(r"\d+", "%", name) in targets, f"{page.name} names make {name}"


def test_the_glossary_is_in_order() -> None:
    terms = re.findall(r"^(\S.*)\n: ", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(terms) > 10 and terms == sorted(terms)


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
@pytest.mark.skipif(find_spec("sphinx_book_theme") is None, reason="the extra `docs` is not installed")
def test_the_site(tmp_path: Path) -> None:
    assert docs.main(["--out", str(tmp_path)]) == 0
    assert (tmp_path / "html" / "notebooks" / "4_prefix_caching.html").exists()
    assert list(complaints(tmp_path / "html")) == []
