"""Build step: compile the native program and carry it in the package.

Everything else stands in pyproject.toml. `CC` chooses the compiler; without one that links
statically the build fails with what it printed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.develop import develop
from setuptools.dist import Distribution

ROOT = Path(__file__).resolve().parent
PROGRAM = "coldframe-native"


def _compilers() -> list[str]:
    """Which compilers to try, best first: with musl, processes start faster (native/Makefile)."""
    asked = os.environ.get("CC")
    if asked:
        return [asked]
    return [name for name in ("musl-gcc", "cc", "gcc", "clang") if shutil.which(name)]


def compile_native(target: Path) -> None:
    """Compile native/ into `target`.

    Raises SystemExit with the compilers' output when none of them can.
    """
    said = []
    for compiler in _compilers():
        for link in ("-static",) if "musl" in compiler else ("-static-pie", "-static"):
            done = subprocess.run(
                ["make", "-C", str(ROOT / "native"), "all", f"CC={compiler}", f"LINK={link}"],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                target.mkdir(parents=True, exist_ok=True)
                fresh = target / f"{PROGRAM}.new"
                shutil.copy2(ROOT / "native" / "build" / PROGRAM, fresh)
                fresh.replace(target / PROGRAM)
                return
            said.append(f"{compiler} {link}:\n{done.stdout}{done.stderr}")
    raise SystemExit(
        "coldframe: cannot compile native/ (a C compiler and make are needed)\n" + "\n".join(said)
    )


class BuildWithNative(build_py):
    """build_py, and the native program beside the modules."""

    def run(self) -> None:
        if self.editable_mode:
            compile_native(ROOT / "src" / "coldframe" / "_native")
        super().run()
        if not self.editable_mode:
            compile_native(Path(self.build_lib) / "coldframe" / "_native")


class DevelopWithNative(develop):
    """`setup.py develop`, for old installers."""

    def run(self) -> None:
        compile_native(ROOT / "src" / "coldframe" / "_native")
        super().run()


class BinaryDistribution(Distribution):
    """The wheel is for one architecture."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    cmdclass={"build_py": BuildWithNative, "develop": DevelopWithNative},
    distclass=BinaryDistribution,
)
