"""The systemd unit that `deploy/` gives."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from coldframe.cli import node
from coldframe.gateway.stopping import _SIGNALS, Stop
from coldframe.host import cgroups

UNIT = Path(__file__).resolve().parents[3] / "deploy/coldframe.service"


@pytest.fixture
def service() -> configparser.SectionProxy:
    """Its section [Service]."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their case
    parser.read_string(UNIT.read_text())
    return parser["Service"]


def test_unit_leaves_what_the_daemon_has_started(service: configparser.SectionProxy) -> None:
    """With any other way to stop, every restart of the service would end all training."""
    assert service["KillMode"] == "process"
    assert service["Delegate"] == "yes"
    assert service["DelegateSubgroup"] == cgroups._SELF_LEAF
    stops = {number.name: stop for number, stop in _SIGNALS.items()}
    assert stops[service["KillSignal"]] is Stop.LEAVE
    reload = service["ExecReload"].split()
    assert stops[f"SIG{reload[1].lstrip('-')}"] is Stop.REPLACE
    assert reload[2] == "$MAINPID"
    assert service["ExecStart"].endswith("coldframe serve")
    assert node.upgrade.__doc__ is not None


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """A setting that it ignores would be found on the day of the first restart."""
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text())

    seen = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        check=False,
    )

    told = [line for line in seen.stderr.splitlines() if UNIT.name in line]
    # An older systemd leaves this one out, and the daemon steps aside by itself.
    assert [line for line in told if "DelegateSubgroup" not in line] == [], seen.stderr
