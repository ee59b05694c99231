"""Web pages that are one HTML file each, and load nothing else: made from templates and data."""

import base64
import gzip
import re
from pathlib import Path


def filled(template: Path, **values: str | Path) -> str:
    """The template, with each {{ name }} replaced by its value. A path stands for the text of its file."""

    def text(name: str) -> str:
        value = values[name]
        return value.read_text(encoding="utf-8") if isinstance(value, Path) else value

    return re.sub(r"\{\{(\w+)\}\}", lambda match: text(match[1]), template.read_text(encoding="utf-8"))


def packed(content: bytes) -> str:
    """The content as base64 of gzip, for a script of the page. Equal contents give equal texts."""
    return base64.b64encode(gzip.compress(content, mtime=0)).decode()
