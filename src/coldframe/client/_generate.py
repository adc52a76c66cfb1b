"""Generate `_sync` from `_async`, so that both SDKs are one source.

`python -m coldframe.client._generate` writes; `--check` says whether what is there is up to date
(exit status 1 if it is not). Needs unasync and ruff, of the `dev` extra.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = {
    "AsyncSandboxClient": "SandboxClient",
    "AsyncSandbox": "Sandbox",
    "AsyncProcess": "Process",
    "AsyncOutputStream": "OutputStream",
    "AsyncSession": "Session",
    "AsyncFiles": "Files",
    "AsyncContent": "Content",
    "AsyncConnection": "Connection",
    "AsyncRunner": "Portal",
    "_async": "_sync",
    "_runner": "_portal",
    "AsyncGenerator": "Generator",
    "aclose": "close",
}
"""What else is renamed than unasync does by itself."""
_UNASYNC = """
import json, sys, unasync
sources, source, target, names = json.loads(sys.argv[1])
unasync.unasync_files(sources, [unasync.Rule(source, target, additional_replacements=names)])
"""


def generate(target: Path) -> None:
    """Write the generated modules into a directory, formatted."""
    sources = sorted((HERE / "_async").glob("*.py"))
    given = [str(source) for source in sources], f"{HERE / '_async'}/", f"{target}/", NAMES
    # In a process of its own: unasync brings setuptools, which replaces distutils as a whole.
    subprocess.run([sys.executable, "-c", _UNASYNC, json.dumps(given)], check=True)
    for source in sources:
        written = target / source.name
        note = f"# Generated from _async/{source.name}; do not edit.\n"
        written.write_text(note + written.read_text())
    ruff = [sys.executable, "-m", "ruff"]
    options = ["--isolated", "--quiet", "--no-cache", "--line-length=100", "--target-version=py311"]
    for step in (["check", "--select=I,UP028", "--fix", "--unsafe-fixes"], ["format"]):
        subprocess.run([*ruff, *step, *options, str(target)], check=True)


def stale(directory: Path) -> list[str]:
    """Return the names of generated modules that differ from their source."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        generate(fresh)
        names = {path.name for path in [*fresh.glob("*.py"), *directory.glob("*.py")]}
        return sorted(name for name in names if _text(fresh / name) != _text(directory / name))


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    if not parser.parse_args(arguments).check:
        generate(HERE / "_sync")
        return 0
    outdated = stale(HERE / "_sync")
    for name in outdated:
        sys.stderr.write(f"_sync/{name} is out of date: python -m coldframe.client._generate\n")
    return 1 if outdated else 0


if __name__ == "__main__":
    sys.exit(main())
