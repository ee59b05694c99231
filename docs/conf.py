"""How Sphinx builds the site. `make docs` (tools/docs/build.py) prepares what it reads, and calls it."""

import re
import textwrap
from collections.abc import Iterator
from typing import Any

project = "nanovllm"
author = "the nanovllm authors, under the MIT license"
extensions = ["myst_nb", "sphinx.ext.autodoc"]
html_theme = "sphinx_book_theme"
html_title = "nanovllm"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["extra"]  # pages that are whole by themselves: slides, the film, a trace
html_show_copyright = False
html_domain_indices = html_use_index = False
html_show_sphinx = False
html_theme_options = {
    "show_toc_level": 2,
    "max_navbar_depth": 1,  # the 250 source files would be in it on each of as many pages; source/index lists them
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navigation_with_keys": False,
}
html_copy_source = False
smartquotes = False  # they make a dash of the two hyphens of an option
pygments_style = "friendly"
pygments_dark_style = "monokai"
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
# The notebooks carry their outputs, and nothing on the site is fetched from elsewhere: no widgets. Short formulas are
# spelled out by tools/docs/build.py. A page with another one would ask for a file that is not there, which a test
# notices.
nb_render_markdown_format = "myst"  # so that tables in outputs are tables
nb_execution_mode = "off"
nb_code_prompt_show = "show the code"
nb_code_prompt_hide = "hide the code"
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
mathjax_path = "not-used.js"
autodoc_default_options = {"members": True, "member-order": "bysource"}
python_maximum_signature_line_length = 100


PARAMETER = re.compile(r"(\w+(?:, \w+)*): (?=\S)")  # how the text on a parameter begins
ALIGNED = re.compile(r"\S {2,}\S")  # columns, as of a table


def paragraphs(lines: list[str]) -> Iterator[list[str]]:
    """Stretches of lines without an empty one. The text on a parameter is one of its own."""
    found: list[str] = []
    for line in [*lines, ""]:
        if found and (not line.strip() or (PARAMETER.match(line) and PARAMETER.match(found[0]))):
            yield found
            found = []
        if line.strip():
            found.append(line)


def marked_up(paragraph: list[str]) -> list[str]:
    """A paragraph of a docstring, which is plain text with `names`, as markup. Columns and code stay as written."""
    if paragraph[0].startswith("    ") or any(map(ALIGNED.search, paragraph)):
        code = textwrap.dedent("\n".join(paragraph)).splitlines()
        return [".. code-block:: text", "", *(f"   {line}" for line in code), ""]
    text = " ".join(map(str.strip, paragraph))
    name = PARAMETER.match(text)
    parts = text[name.end() if name else 0 :].split("`")  # every other one is a name
    text = "".join(f"``{part}``" if i % 2 else re.sub(r"([\\*_|])", r"\\\1", part) for i, part in enumerate(parts))
    return [f"- **{name[1]}**: {text}" if name else text, ""]


def as_prose(app: object, what: str, name: str, thing: Any, options: object, lines: list[str]) -> None:
    lines[:] = [line for paragraph in paragraphs(lines) for line in marked_up(paragraph)]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", as_prose)
