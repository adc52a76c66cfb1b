"""Write small task directories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

BASE = """
schema_version = "1.3"
[environment]
docker_image = "debian:bookworm"
network_mode = "no-network"
"""


def write_files(directory: Path, contents: Mapping[str, str]) -> Path:
    """Write files by their paths in a directory, and return the directory."""
    for path, text in contents.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return directory


def write_task(root: Path, name: str = "one", toml: str = BASE, **files: str) -> Path:
    """Write a task; `files` maps `tests__test_sh`-like names to contents."""
    contents = {
        "task.toml": toml,
        "instruction.md": f"Do {name}.\n",
        "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "#!/bin/sh\ntrue\n",
    }
    contents |= {
        path.replace("__", "/").replace("_sh", ".sh"): text for path, text in files.items()
    }
    return write_files(root / name, contents)
