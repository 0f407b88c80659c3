"""A headless Chromium without a network, driven over its debugging pipe."""

import fcntl
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"),
    *("--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND"),
)


def find() -> str | None:
    """The program that CHROMIUM names, or one of the usual names; None: there is none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page and all that it asked for or complained about."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._writer = os.fdopen(to_browser, "wb", buffering=0)
        self._reader = os.fdopen(from_browser, "rb")
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """The result of one command of the DevTools protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **self._session}
        self._writer.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path: Path, width: int) -> None:
        """Load a file into a window of that width and wait until it is drawn."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while all(event["method"] != "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def of(self, *methods: str) -> list[dict[str, Any]]:
        """The parameters of the events of these kinds since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    def _read(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._reader.read(1)) != b"\0":
            assert byte, "the browser ended"
            data += byte
        return json.loads(data)


@contextmanager
def page(program: str, folder: Path) -> Iterator[Page]:
    """A page in a browser whose profile is in `folder`; the browser ends with the block."""
    (for_browser, to_browser), (from_browser, by_browser) = os.pipe(), os.pipe()

    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (for_browser, by_browser)]
    script = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}'  # where the browser reads and writes
    command = ["bash", "-c", script, "bash", program, *FLAGS, f"--user-data-dir={folder}"]
    with subprocess.Popen(command, pass_fds=ends, stderr=subprocess.DEVNULL) as process:
        for end in (for_browser, by_browser, *ends):
            os.close(end)
        try:
            yield Page(to_browser, from_browser)
        finally:
            process.kill()
