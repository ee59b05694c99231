"""The page at `/`: a chat with the model, in one file that loads nothing from anywhere."""

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from fastapi import Response


def page() -> Response:
    """The page, with headers by which a browser runs its own script and no other, and asks no other server.

    The page may be loaded without a key: it has nothing in it. What it asks of the server needs one.
    """
    text = files("nanovllm.server").joinpath("page.html").read_text("utf-8")
    allowed = {kind: hash_of(text, kind) for kind in ("script", "style")}
    policy = {
        "default-src": "'none'",
        "script-src": allowed["script"],
        "style-src": allowed["style"],
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",  # after an update of the server, the page is the new one
    }
    return Response(text, media_type="text/html", headers=headers)


def hash_of(text: str, kind: str) -> str:
    """As a Content-Security-Policy names the one <script> or <style> of a page (CSP Level 3, section 6.7.3)."""
    [inner] = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
    return f"'sha256-{b64encode(sha256(inner.encode()).digest()).decode()}'"
