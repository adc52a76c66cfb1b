"""One worker of the spawner, seen from the process that started it."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from coldframe.host.link import Link
from coldframe.host.worker import Worker


def test_worker_that_several_wait_for_is_reaped_once() -> None:
    """One that is lost while its spawner closes is waited for twice; neither may fail."""
    for _ in range(30):
        process = subprocess.Popen(["sleep", "60"])
        worker = Worker(process.pid, os.pidfd_open(process.pid), cast("Link", None))
        with ThreadPoolExecutor(8) as threads:
            waits = [threads.submit(worker.wait, 30) for _ in range(8)]
            process.kill()
            process.returncode = 0  # it is waited for by its pidfd
            assert all(wait.result() for wait in waits)
        assert worker.pidfd == -1
