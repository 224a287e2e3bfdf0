"""A headless Chromium that tests drive through its debugging pipe. It reaches no network: what it
asks for goes to a proxy that nobody is. With `loopback` it reaches this machine."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-quic", "--disable-extensions", "--disable-default-apps", "--mute-audio"),
    # Port 9 is nobody's: what is asked of the network is refused at once.
    "--proxy-server=http://127.0.0.1:9",
    *("--remote-debugging-pipe", "--force-device-scale-factor=1"),
)
_NO_LOOPBACK = "--proxy-bypass-list=<-loopback>"
_WAIT_SEC = 60.0


class BrowserError(Exception):
    """It is not installed, or did not do as it was told."""


class Browser:
    """One browser with one page."""

    def __init__(self, width: int = 1180, height: int = 1000, loopback: bool = False) -> None:
        self._size = (width, height)
        self._flags = _FLAGS if loopback else (*_FLAGS, _NO_LOOPBACK)
        self._numbers = itertools.count(1)
        self._events: list[dict[str, Any]] = []
        self._read = b""

    def __enter__(self) -> Browser:
        program = shutil.which("chromium")
        if program is None:
            raise BrowserError("chromium is missing: `tools/setup/ensure-servers` installs it")
        self._folder = tempfile.mkdtemp(prefix="specbatch-browser-")
        theirs_in, self._to = _pipe()
        self._from, theirs_out = _pipe()
        wide, high = self._size
        own = (f"--user-data-dir={self._folder}", f"--window-size={wide},{high}", "about:blank")
        command = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", program, *self._flags, *own],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        targets = self._say("Target.getTargets", None)["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self._say("Target.attachToTarget", None, targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.say(f"{domain}.enable")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._say("Browser.close", None)
            self._process.wait(10)
        except (BrowserError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            os.close(self._to)
            os.close(self._from)
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- what tests ask for -----------------------------------------------------------------
    def open(self, place: Path | str) -> dict[str, float]:
        """Open a file or URL; the page's own timing of it, in milliseconds from the start."""
        self._events.clear()
        url = place if isinstance(place, str) else place.absolute().as_uri()
        self.say("Page.navigate", url=url)
        self._until("Page.loadEventFired")
        timing: dict[str, float] = self.evaluate(
            "new Promise(done => requestAnimationFrame(() => setTimeout(() => done("
            "{...performance.getEntriesByType('navigation')[0].toJSON(), painted: "
            "(performance.getEntriesByName('first-contentful-paint')[0] || {}).startTime || 0}"
            "))))"
        )
        return timing

    def leave_by(self, expression: str) -> None:
        """Do what leads to another page, and wait until that one is there."""
        self._events.clear()
        self.evaluate(f"setTimeout(() => {{ {expression} }}, 0); 0")
        self._until("Page.loadEventFired")

    def requested(self) -> list[str]:
        """All URLs that the page asked for since it was opened."""
        asked = [e for e in self._events if e["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in asked]

    def complaints(self) -> list[str]:
        """What the page logged as an error: violations of its policy, and of its script."""
        said = [
            e["params"]["entry"]["text"]
            for e in self._events
            if e["method"] == "Log.entryAdded" and e["params"]["entry"]["level"] == "error"
        ]
        thrown = [e for e in self._events if e["method"] == "Runtime.exceptionThrown"]
        return said + [str(e["params"]["exceptionDetails"].get("text")) for e in thrown]

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        done = self.say(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in done:
            raise BrowserError(f"{expression}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def prefer(self, scheme: str, media: str = "screen") -> None:
        """`light` or `dark`; `screen` or `print`."""
        wish = {"name": "prefers-color-scheme", "value": scheme}
        self.say("Emulation.setEmulatedMedia", media=media, features=[wish])

    def size(self, width: int, height: int) -> None:
        self.say("Emulation.setDeviceMetricsOverride", width=width, height=height,
                 deviceScaleFactor=1, mobile=False)  # fmt: skip

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.say("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def move_to(self, x: float, y: float) -> None:
        self.say("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, whole: bool = True) -> bytes:
        """A PNG of the page, or of what is in view."""
        told = self.say("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(told["data"])

    def pdf(self) -> bytes:
        """The page as it prints."""
        told = self.say("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        return base64.b64decode(told["data"])

    def say(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the DevTools protocol to the page."""
        return self._say(method, self._session, **parameters)

    # --- the pipe: JSON between NULs -----------------------------------------------------------
    def _say(self, method: str, session: str | None, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _until(self, event: str) -> None:
        while not any(known["method"] == event for known in self._events):
            self._next()

    def _next(self) -> dict[str, Any]:
        """The next message; events are kept."""
        until = time.monotonic() + _WAIT_SEC
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._from], [], [], until - time.monotonic())
            data = os.read(self._from, 1 << 20) if ready else b""
            if not data:
                raise BrowserError("chromium ended, or did not answer in time")
            self._read += data
        line, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self._events.append(message)
        return message


def _pipe() -> tuple[int, int]:
    """Its ends are none of those that the browser is given: 3 and 4."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
