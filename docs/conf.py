"""How Sphinx builds the site. `make docs` (tools/docs/build.py) prepares what it reads, and calls it."""

from typing import Any

project = "nanovllm"
author = "the nanovllm authors, under the MIT license"
extensions = ["myst_nb", "sphinx.ext.autodoc"]
html_theme = "sphinx_book_theme"
html_title = "nanovllm"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_domain_indices = html_use_index = False
html_show_sphinx = False
html_theme_options = {
    "show_toc_level": 2,
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
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
mathjax_path = "not-used.js"
autodoc_default_options = {"members": True, "member-order": "bysource"}
python_maximum_signature_line_length = 100


def as_written(app: object, what: str, name: str, thing: Any, options: object, lines: list[str]) -> None:
    """Show a docstring exactly as it stands in the code: it is plain text, not markup."""
    lines[:] = [".. code-block:: text", "", *(f"   {line}" for line in lines)]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", as_written)
