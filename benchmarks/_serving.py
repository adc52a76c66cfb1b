"""A service of this machine, to be measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coldframe.node.settings import NodeSettings


@dataclass
class Service:
    """`coldframe serve`, a process of its own."""

    unix: str
    tcp: str
    pid: int

    def memory_mib(self) -> float:
        """Its resident memory in MiB."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise AssertionError("no VmRSS")

    def peak_mib(self) -> float:
        """Its largest resident memory since `reset_peak`."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
        raise AssertionError("no VmHWM")

    def reset_peak(self) -> None:
        """Begin anew with the largest."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def descriptors(self) -> int:
        """How many it has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


@contextmanager
def serving() -> Iterator[Service]:
    """A service of this machine's images, on both kinds of sockets.

    Its home lies within this machine's, on the same disk: that one may be served already, and may
    have keys.
    """
    home = NodeSettings.from_environment().home
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=home) as scratch:
        Path(scratch, "images").symlink_to(home / "images")
        command = [sys.executable, "-m", "coldframe.cli.main", "serve", "--listen", "127.0.0.1:0"]
        environment = {**os.environ, "COLDFRAME_HOME": scratch}
        environment.pop("COLDFRAME_STORE", None)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            urls: dict[str, str] = {}
            assert process.stdout is not None
            while len(urls) < 2:
                line = process.stdout.readline()
                assert line, "the service ended"
                if line.startswith("serving "):
                    url = line.split()[1]
                    urls[url.partition(":")[0]] = url
            yield Service(urls["unix"], urls["http"], process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)
