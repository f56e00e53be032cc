"""Chromium without a screen and without a network, used as a person uses it: pointer and keys."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="no `chromium` is on the PATH: install Debian's package chromium"
)
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9",
    "--disable-background-networking", "--remote-debugging-pipe",
)  # fmt: skip


class Tab:
    """One page; `console` is what the page logged, and what it was refused."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes, self._number, self._rest = reads, writes, 0, b""
        self._session = ""
        self.console: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **given: Any) -> dict[str, Any]:
        """Send a command of Chromium's debugging protocol; return what it answers."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": given}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._writes, json.dumps(asked).encode() + b"\0")
        while (said := self._next()).get("id") != self._number:
            if said.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):  # fmt: skip
                self.console.append(json.dumps(said["params"])[:500])
        assert "error" not in said, said
        return said["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            some = os.read(self._reads, 1 << 20)
            assert some, "Chromium has ended"
            self._rest += some
        said, _, self._rest = self._rest.partition(b"\0")
        return json.loads(said)

    def open(self, page: Path, width: int = 1280, *, is_dark: bool = False) -> None:
        """Load a page at a width, and wait until its pictures are drawn."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=page.as_uri())
        self.wait("document.readyState === 'complete'")
        self.settle()

    def show(self, folder: Path, page: str, **how: Any) -> None:
        """Write a page into a folder, and load it."""
        (folder / "page.html").write_text(page, encoding="utf-8")
        self.open(folder / "page.html", **how)

    def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript."""
        said = self.ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def wait(self, script: str, seconds: float = 30) -> None:
        until = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < until, script
            time.sleep(0.05)

    def settle(self) -> None:
        """Wait until what is due is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 60)))")

    def text(self, selector: str) -> str:
        """What is seen of an element's text."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Scroll to an element; return its left and upper edge, its width and height."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{found}.scrollIntoView({{block: 'center'}})")
        names = ("left", "top", "width", "height")
        values = ", ".join(f"{found}.getBoundingClientRect().{name}" for name in names)
        left, top, width, height = self.run(f"[{values}]")
        return left, top, width, height

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        given = {"type": f"mouse{kind}", "x": x, "y": y, "button": "left" if kind != "Moved" else "none"}  # fmt: skip
        self.ask("Input.dispatchMouseEvent", **{**given, "clickCount": 1, **more})

    def point(self, selector: str, across: float, down: float) -> tuple[float, float]:
        """Move the pointer to a place in an element, in parts of its size."""
        left, top, width, height = self.box(selector)
        x, y = left + across * width, top + down * height
        self.mouse("Moved", x, y)
        self.settle()
        return x, y

    def click(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        x, y = self.point(selector, across, down)
        self.mouse("Pressed", x, y)
        self.mouse("Released", x, y)
        self.settle()

    def drag(self, selector: str, begin: float, end: float) -> None:
        """Drag across an element, in parts of its width."""
        x, y = self.point(selector, begin, 0.5)
        _, _, width, _ = self.box(selector)
        self.mouse("Pressed", x, y)
        self.mouse("Moved", x + (end - begin) * width, y, buttons=1, button="left")
        self.mouse("Released", x + (end - begin) * width, y)
        self.settle()

    def press(self, key: str, *, shift: bool = False) -> None:
        given = {"key": key, "modifiers": 8 if shift else 0}
        if len(key) == 1:
            given["text"] = key
        self.ask("Input.dispatchKeyEvent", type="keyDown", **given)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def write(self, text: str) -> None:
        self.ask("Input.insertText", text=text)
        self.settle()


@contextmanager
def chromium(folder: Path) -> Iterator[Tab]:
    """Start Chromium, with what it keeps in a folder."""
    assert CHROMIUM is not None
    (reads, theirs_out), (theirs_in, writes) = os.pipe(), os.pipe()
    # It reads from file 3 and writes to file 4.
    command = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    program = subprocess.Popen(
        ["bash", "-c", command, "sh", CHROMIUM, *_FLAGS, f"--user-data-dir={folder / 'profile'}"],
        pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Tab(reads, writes)
    finally:
        os.close(writes)
        program.kill()
        program.wait()
        os.close(reads)
