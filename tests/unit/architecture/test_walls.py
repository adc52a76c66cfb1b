"""What an import really drags in, seen in fresh interpreters.

import-linter reads the sources; it does not see what an `__init__` loads, nor what a lazy
import loads too early.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Entry → rooms (or packages) that importing it must not load.
WALLS = {
    "coldframe": {"client", "node", "host", "runtimes", "images", "rollouts", "cli", "+pydantic"},
    "coldframe.protocol": {"client", "node", "host", "runtimes", "images", "rollouts", "+httpx"},
    "coldframe.protocol.models": {"client", "node", "host", "runtimes", "images", "rollouts"},
    "coldframe.host": {"client", "node", "runtimes", "images", "rollouts", "trajectories"},
    "coldframe.images": {"client", "node", "host", "runtimes", "rollouts"},
    "coldframe.runtimes": {"client", "node", "host", "rollouts"},
    "coldframe.runtimes.base": {"client", "node", "host", "rollouts"},
    "coldframe.node.node": {"client", "rollouts", "trajectories", "harnesses", "cli", "+typer"},
    "coldframe.gateway.server": {
        "client",
        "rollouts",
        "trajectories",
        "harnesses",
        "cli",
        "+typer",
    },
    "coldframe.client._remote": {"node", "host", "runtimes", "gateway", "cli", "+fastapi"},
    "coldframe.client": {"node", "host", "runtimes", "rollouts", "cli", "+typer", "+structlog"},
    "coldframe.trajectories.store": {"node", "host", "runtimes", "rollouts", "cli", "+typer"},
    "coldframe.harnesses": {"node", "host", "runtimes", "rollouts", "cli", "+typer"},
    "coldframe.rollouts.run": {"node", "host", "runtimes", "cli", "+typer", "+rich"},
    "coldframe.inference.local": {"client", "node", "host", "learning", "gateway", "+fastapi"},
    "coldframe.learning.captured": {"client", "node", "host", "inference", "+torch", "+httpx"},
    "coldframe.learning.contracts": {"client", "node", "host", "rollouts", "+torch", "+httpx"},
    "coldframe.integrations.harbor_rl": {"client", "node", "host", "+harbor", "+litellm", "+torch"},
    "coldframe.cli.main": {"client", "node", "host", "runtimes", "images", "rollouts", "+rich"},
}


def _loaded(statement: str, *flags: str) -> set[str]:
    """Return the modules of a fresh interpreter after a statement."""
    ended = subprocess.run(
        [sys.executable, *flags, "-c", f"{statement}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(ended.stdout.split())


@pytest.mark.parametrize("entry", sorted(WALLS))
def test_import_of_an_entry_loads_no_room_behind_its_walls(entry: str) -> None:
    """A trainer that imports the client must not load what touches the kernel."""
    loaded = _loaded(f"import {entry}")

    forbidden = {wall[1:] if wall.startswith("+") else f"coldframe.{wall}" for wall in WALLS[entry]}
    assert loaded & forbidden == set()


def test_public_names_are_loaded_when_they_are_asked_for() -> None:
    """`from coldframe import SandboxClient` is the first line of every program."""
    loaded = _loaded("from coldframe import SandboxClient")

    assert "coldframe.client" in loaded
    assert not {"coldframe.node", "coldframe.host"} & loaded


def test_client_without_the_extras_can_be_imported() -> None:
    """The bare wheel has pydantic and httpx only."""
    hide = "import sys\nfor name in ('typer', 'rich', 'structlog'): sys.modules[name] = None\n"

    assert "coldframe.client" in _loaded(f"{hide}import coldframe.client")


def test_import_contracts_are_kept() -> None:
    """The walls of the design, over every import in the sources."""
    ended = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout


def test_environment_is_read_by_settings_only() -> None:
    """A room that reads the environment behind its settings cannot be tested or embedded."""
    allowed = {
        "src/coldframe/cli/variables.py",  # names only, to tell what is misspelt
        "src/coldframe/cli/stdio.py",  # TERM: what kind our own terminal is
        "src/coldframe/client/_address.py",
        "src/coldframe/gateway/handover.py",  # what the program before hands over
        "src/coldframe/images/bootstrap.py",  # hands apt and mmdebstrap their own
        "src/coldframe/node/settings.py",
        "src/coldframe/rollouts/settings.py",
    }
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "src").rglob("*.py")
        if re.search(r"os\.environ|getenv\(", path.read_text())
    }

    assert found - allowed == set()
