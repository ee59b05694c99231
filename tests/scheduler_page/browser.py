"""A Chromium without a window, asked over a pipe: what a page says after real seconds, and how it looks."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page. Whatever it writes to its console as a warning or an error is in `complaints`."""

    def __init__(self, page: Path, profile: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        assert CHROMIUM is not None
        (read_ours, write_theirs), (read_theirs, write_ours) = os.pipe(), os.pipe()
        # Chromium reads its orders from descriptor 3 and answers on 4.
        joined = f'exec 3<&{read_theirs} 4>&{write_theirs}; exec "$@"'
        command = [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        command += [f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(
            ["bash", "-c", joined, "bash", *command],
            pass_fds=(read_theirs, write_theirs),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_theirs)
        os.close(write_theirs)
        self.read, self.write, self.unread, self.number = read_ours, write_ours, b"", 0
        self.complaints: list[str] = []
        self.session: str | None = None
        target = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Runtime.enable")
        self.send("Page.enable")
        self.send("Page.navigate", url=page.as_uri())

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.read)
        os.close(self.write)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Give an order, and wait for its answer. Raises RuntimeError for a refusal, TimeoutError after a minute."""
        self.number += 1
        order = {"id": self.number, "method": method, "params": params}
        os.write(self.write, json.dumps(order | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        until = time.monotonic() + 60
        while True:
            message = self.receive(until - time.monotonic())
            if message.get("id") == self.number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            kind, told = message.get("method"), message.get("params", {})
            if kind == "Runtime.exceptionThrown":
                self.complaints.append(told["exceptionDetails"].get("exception", {}).get("description", "exception"))
            elif kind == "Runtime.consoleAPICalled" and told["type"] in ("warning", "error"):
                self.complaints.append(str([part.get("value") for part in told["args"]]))

    def receive(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self.unread:
            if seconds <= 0 or not select.select([self.read], [], [], seconds)[0]:
                raise TimeoutError("Chromium gave no answer")
            self.unread += os.read(self.read, 1 << 20)
        text, self.unread = self.unread.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        return message

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives, after its promise if it is one."""
        got = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Until a JavaScript expression is true."""
        until = time.monotonic() + seconds
        while not self.value(f"Boolean({condition})"):
            if time.monotonic() > until:
                raise TimeoutError(f"not true within {seconds} s: {condition}")
            time.sleep(0.05)

    def drag(self, *points: tuple[float, float]) -> None:
        """Press at the first point, move over the others, let go at the last."""
        where = [{"x": x, "y": y, "button": "left", "clickCount": 1} for x, y in points]
        self.send("Input.dispatchMouseEvent", type="mousePressed", **where[0])
        for place in where:
            self.send("Input.dispatchMouseEvent", type="mouseMoved", buttons=1, **place)
        self.send("Input.dispatchMouseEvent", type="mouseReleased", **where[-1])

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: Path) -> None:
        """The whole page, as long as it is."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
