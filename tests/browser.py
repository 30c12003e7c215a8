"""A headless browser, driven over a pipe by the DevTools protocol: no package is needed for it."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"

PATIENCE = 60.0  # seconds


def find_browser() -> str | None:
    """$DFLASH_BROWSER, or the first browser of Chromium's family on this machine."""
    named = os.environ.get("DFLASH_BROWSER")
    found = [named, *(shutil.which(name) for name in NAMES), MAC if Path(MAC).exists() else None]
    return next((path for path in found if path), None)


class Browser:
    """`with Browser(program, folder) as browser`: one tab. Everything it says is in `events`."""

    def __init__(self, program: str, folder: Path) -> None:
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()
        # The browser reads 3 and writes 4, so neither end may have one of these numbers before.
        there, back = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers))
        self._process = subprocess.Popen(
            [
                "bash", "-c", f'exec "$@" 3<&{there} 4>&{back}', "bash", program, "--headless",
                "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
                "--disable-background-networking", "--disable-dev-shm-usage",
                f"--user-data-dir={folder}", "--hide-scrollbars", "about:blank",
            ],
            pass_fds=(there, back),
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (commands, answers, there, back):
            os.close(end)
        self.events: list[dict[str, Any]] = []
        self._buffer, self._count, self._session = b"", 0, None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)  # the end of its commands ends it
        os.close(self._in)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, url: str, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Load a page into a window of this size and wait until it is there."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=scheme)
        self.events.clear()
        self.ask("Page.navigate", url=url)
        while not any(e["method"] == "Page.loadEventFired" for e in self.events):
            self.events.append(self._next())

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, file: Path) -> None:
        """The whole page as PNG."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    @property
    def requests(self) -> list[str]:
        """Addresses of everything that the page asked for, itself included."""
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [e["params"]["request"]["url"] for e in sent]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """What stands in the console."""
        loud = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [e for e in self.events if e["method"] in loud]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], PATIENCE)
            assert ready, "the browser does not answer"
            more = os.read(self._in, 1 << 16)
            assert more, "the browser ended"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
