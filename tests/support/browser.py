"""Debian's chromium without a window, driven by its debugging pipe: no port, no further package."""

import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-extensions", "--hide-scrollbars"),
    "--remote-debugging-pipe",
]
KEYS = {"Enter": 13, "Tab": 9, " ": 32, "End": 35, "Home": 36, "ArrowRight": 39}


class Browser:
    """One page of chromium. `events` are all that it has sent: requests, messages of the console, ..."""

    def __init__(self, to_chromium: int, from_chromium: int):
        self.to_chromium, self.from_chromium = to_chromium, from_chromium
        self.events: list[dict[str, Any]] = []
        self.buffer, self.number, self.session = b"", 0, None

    def open(self, url: str) -> Self:
        """Loads a page, and begins the events anew."""
        if self.session is None:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Runtime", "Log", "Accessibility"):
                self.call(f"{domain}.enable")
        for place in ("about:blank", url):  # a new hash alone would load nothing
            self.events.clear()
            self.call("Page.navigate", url=place)
            while not any(event["method"] == "Page.loadEventFired" for event in self.events):
                self.events.append(self._read())
        return self

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str, shift: bool = False) -> None:
        """A key of the keyboard, at the element that has the focus."""
        text = {"text": "\r"} if key == "Enter" else {"text": " "} if key == " " else {}
        code = {"key": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def show_as(self, scheme: str, width: int, height: int) -> None:
        """dark or light, and the size of the window."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the Chrome DevTools Protocol."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to_chromium, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            if "method" in answer:
                self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            assert select.select([self.from_chromium], [], [], 60)[0], "chromium has been silent for a minute"
            more = os.read(self.from_chromium, 1 << 20)
            assert more, "chromium has ended"
            self.buffer += more
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Starts chromium, which reads commands from descriptor 3 and answers on 4. profile: an empty folder."""
    program = shutil.which("chromium")
    assert program
    commands, to_chromium = os.pipe()
    from_chromium, answers = os.pipe()
    redirected = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
    words = ["bash", "-c", redirected, program, *FLAGS, f"--user-data-dir={profile}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(words, pass_fds=(commands, answers), **quiet)
    os.close(commands)
    os.close(answers)
    try:
        yield Browser(to_chromium, from_chromium)
    finally:
        os.close(to_chromium)  # chromium ends when nobody is left to command it
        os.close(from_chromium)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
