"""The audit log's files, and the pace at which refusals are written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coldframe.gateway.app import routes
from coldframe.gateway.audit import AuditLog
from coldframe.gateway.audited import Bounded
from coldframe.gateway.routes import UNKNOWN


def _lines(directory: Path) -> list[dict[str, object]]:
    files = sorted(directory.iterdir())
    return [json.loads(line) for file in files for line in file.read_bytes().splitlines()]


def test_log_is_rotated_by_size_and_bounded(tmp_path: Path) -> None:
    """It must never fill the disk, and the newest is what is kept."""
    entries = AuditLog(tmp_path / "audit", 1000, 3)
    for number in range(500):
        entries.write({"number": number})
    entries.close()

    names = sorted(file.name for file in (tmp_path / "audit").iterdir())
    assert names == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert all(file.stat().st_size <= 1000 for file in (tmp_path / "audit").iterdir())
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "audit").iterdir())
    kept = sorted(int(str(line["number"])) for line in _lines(tmp_path / "audit"))
    assert kept == list(range(kept[0], 500))
    assert 100 < len(kept) < 250  # 16 bytes each


def test_processes_that_write_at_once_lose_and_mix_no_line(tmp_path: Path) -> None:
    """Two gateways of one home have one log."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom coldframe.gateway.audit import AuditLog\n"
        "log = AuditLog(Path(sys.argv[1]), 20_000, 50)\n"
        "for n in range(2000): log.write({'who': sys.argv[2], 'n': n})\n"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "audit")]
    writers = [subprocess.Popen([*words, name]) for name in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]

    found = {(line["who"], line["n"]) for line in _lines(tmp_path / "audit")}
    assert found == {(name, number) for name in "abc" for number in range(2000)}
    assert len(list((tmp_path / "audit").iterdir())) > 3


def test_file_that_another_process_has_rotated_is_not_rotated_again(tmp_path: Path) -> None:
    """Each process would push out one more of the oldest files."""
    one, other = [AuditLog(tmp_path / "audit", 1000, 9) for _ in range(2)]
    one.write({"text": "x" * 900})
    one.write({"text": "x" * 90})  # in the next file
    other.write({"text": "x" * 90})
    one.close()
    other.close()

    names = sorted(file.name for file in (tmp_path / "audit").iterdir())
    assert names == ["audit.jsonl", "audit.jsonl.1"]
    assert len((tmp_path / "audit" / "audit.jsonl").read_bytes().splitlines()) == 2


def test_full_disk_stops_nobody_and_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was not written must at least be known."""
    entries = AuditLog(tmp_path, 1000, 3)
    kept, entries._fd = entries._fd, os.open("/dev/full", os.O_WRONLY)
    for number in range(3):
        entries.write({"number": number})
    os.close(entries._fd)
    entries._fd = kept
    entries.write({"number": 3})
    entries.write({"number": 4})
    entries.close()

    assert _lines(tmp_path) == [{"number": 3, "unwritten": 3}, {"number": 4}]
    assert caplog.text.count("cannot be written") == 1


def test_flood_of_refusals_is_counted_and_hides_nobody_elses() -> None:
    """A log that a stranger can fill is a log that a stranger can empty."""
    now = 0.0
    bounded = Bounded(lambda: now)

    flood = [bounded.admit("stranger") for _ in range(5000)]
    assert [one for one in flood if one is not None] == [0] * 100
    assert bounded.admit("other") == 0
    now = 0.05
    assert bounded.admit("stranger") is None
    now = 0.2
    assert bounded.admit("stranger") == 4901
    for number in range(3000):
        bounded.admit(f"caller {number}")
    assert len(bounded._callers) == 1024


@pytest.mark.parametrize(
    ("method", "path", "template", "sandbox"),
    [
        ("POST", "/v1/sandboxes", "/v1/sandboxes", ""),
        ("POST", "/v1/sandboxes/sb-1/execs", "/v1/sandboxes/{sandbox_id}/execs", "sb-1"),
        ("DELETE", "/v1/sandboxes/sb-1", "/v1/sandboxes/{sandbox_id}", "sb-1"),
        (None, "/v1/execs/x/attach", "/v1/execs/{operation_id}/attach", ""),
        ("PATCH", "/v1/sandboxes", UNKNOWN, ""),
        ("GET", "/etc/passwd", UNKNOWN, ""),
        ("GET", "/v1/execs/x/attach", UNKNOWN, ""),
    ],
)
def test_route_is_found_before_it_is_routed(
    method: str | None, path: str, template: str, sandbox: str
) -> None:
    """What is refused at the door is logged by what it was for."""
    scope = {"path": path} if method is None else {"path": path, "method": method}
    assert routes().find(scope) == (template, sandbox)
