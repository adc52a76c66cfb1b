"""Write small task directories."""

from __future__ import annotations

from pathlib import Path

BASE = """
schema_version = "1.3"
[environment]
docker_image = "debian:bookworm"
network_mode = "no-network"
"""


def write_task(root: Path, name: str = "one", toml: str = BASE, **files: str) -> Path:
    """Write a task; `files` maps `tests__test_sh`-like names to contents."""
    directory = root / name
    contents = {
        "task.toml": toml,
        "instruction.md": f"Do {name}.\n",
        "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "#!/bin/sh\ntrue\n",
    }
    contents |= {
        path.replace("__", "/").replace("_sh", ".sh"): text for path, text in files.items()
    }
    for path, text in contents.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return directory
