"""A headless Chromium, driven by its DevTools protocol over two pipes: real keys, any width, light and dark."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "ArrowLeft": (37, ""), "ArrowRight": (39, ""), "Delete": (46, "")}


class Page:
    """One tab. What the page says in its console, and what it asks of whom, is kept."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._answers = os.fdopen(write, "wb", 0), os.fdopen(read, "rb", 0)
        self._unread, self._number, self._session = b"", 0, ""
        self.console: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in "Page", "Runtime", "Log", "Network":
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        more = {"sessionId": self._session} if self._session else {}
        self._write.write(json.dumps({"id": self._number, "method": method, "params": params, **more}).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            new = self._answers.read(1 << 16)
            assert new, "the browser is gone"
            self._unread += new
        raw, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.console.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.console.append(json.dumps(params["args"]))
            case "Log.entryAdded":
                self.console.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def look(self, width: int, height: int = 800, dark: bool = False) -> None:
        """Give the tab a size and the system a preference."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 30) -> None:
        """Until this is true."""
        end = time.monotonic() + seconds
        while not self.js(f"!!({expression})"):
            assert time.monotonic() < end, (
                f"{expression} is not true; the page shows {self.js('document.body.innerText')}"
            )
            time.sleep(0.02)

    def press(self, key: str, shift: bool = False) -> None:
        code, text = KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def drag(self, *points: tuple[float, float]) -> None:
        """Press at the first point, move over the others, let go at the last."""
        where = [{"x": x, "y": y, "button": "left", "clickCount": 1} for x, y in points]
        self.call("Input.dispatchMouseEvent", type="mousePressed", **where[0])
        for place in where:
            self.call("Input.dispatchMouseEvent", type="mouseMoved", buttons=1, **place)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **where[-1])

    def shoot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(directory: Path) -> Iterator[Page]:
    """A fresh Chromium, whose profile is in `directory`."""
    assert CHROMIUM is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    flags = "--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run --no-proxy-server"
    # Chromium reads from descriptor 3 and writes to descriptor 4, whatever numbers the pipes have here.
    command = f'exec "$0" {flags} "--user-data-dir=$1" 3<&{to_browser[0]} 4>&{from_browser[1]}'
    process = subprocess.Popen(
        ["bash", "-c", command, CHROMIUM, str(directory / "profile")],
        pass_fds=(to_browser[0], from_browser[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        page = Page(to_browser[1], from_browser[0])
        yield page
        page.call("Browser.close")
    finally:
        process.kill()
        process.wait()
