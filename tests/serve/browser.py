"""A headless Chromium that a test drives: pages, clicks by script, what it asked for and complained about, pictures.

It speaks the DevTools protocol over the websocket that Chromium offers; nothing has to be installed beside Debian's
`chromium`.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
START_TIMEOUT_S = 120.0  # of a browser on a loaded machine
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--no-proxy-server",
    "--hide-scrollbars", "--force-device-scale-factor=1", "--remote-debugging-port=0",
)  # fmt: skip


class Page:
    """One tab. `requests` are the addresses it asked for, `problems` what it complained about."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._last_id = 0
        self.requests: list[str] = []
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        self._last_id += 1
        self._connection.send(json.dumps({"id": self._last_id, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=60))
            if message.get("id") == self._last_id:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, event: str | None, parameters: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"]))
        elif event == "Log.entryAdded":
            self.problems.append(parameters["entry"]["text"])

    def open(self, url: str) -> None:
        """Go to a page."""
        self.send("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, timeout_s: float = 60.0) -> None:
        """Poll until an expression is true in the page."""
        deadline = time.monotonic() + timeout_s
        while not self.run(condition):
            assert time.monotonic() < deadline, f"{condition} did not come true: {self.run('document.body.innerText')}"
            time.sleep(0.05)

    def look(self, width: int, height: int, dark: bool = False) -> None:
        """Set the size of the window and the colour scheme."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """The whole page as a PNG file."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with a profile of its own in `folder`, and its first tab."""
    assert CHROMIUM is not None, "there is no Chromium"
    log = (folder / "chromium.log").open("wb")
    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        port = _port(folder / "profile" / "DevToolsActivePort", process)
        tab = _first_tab(port)
        with connect(tab, max_size=None, open_timeout=60, ping_interval=None) as connection:
            yield Page(connection)
    finally:
        process.terminate()
        process.wait(timeout=30)
        log.close()


def _first_tab(port: int) -> str:
    """The address of the websocket of the first page, which may not be there yet when the port is."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=60) as response:
            pages = [target for target in json.load(response) if target["type"] == "page"]
        if pages:
            return pages[0]["webSocketDebuggerUrl"]
        assert time.monotonic() < deadline, "Chromium opened no page"
        time.sleep(0.05)


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (file.is_file() and (text := file.read_text().split())):
        assert process.poll() is None and time.monotonic() < deadline, (
            f"Chromium did not start, see {file.parent.parent}"
        )
        time.sleep(0.05)
    return int(text[0])
