"""`coldframe doctor`: what this machine can do, what is missing, and what fixes it."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path

from coldframe.cli import flags, machine, render
from coldframe.host.doctor import Check, describe_refusal, examine
from coldframe.node.settings import NodeSettings
from coldframe.protocol.errors import CapabilityError, ColdframeError
from coldframe.protocol.models import Capabilities

WANTED_IMAGES = ("debian:bookworm", "busybox:latest")
"""What the examples and the documentation use."""


def doctor(
    as_json: flags.Json = False,
) -> int:
    """Say what this machine can do, what is missing, and the command that fixes it.

    Each check tries the thing itself, the last one makes a sandbox. Exit code: 0 everything
    that is required is there, 1 something is not.
    """
    home = NodeSettings.from_environment().home
    checks = list(examine(home))
    able = _able(checks)
    image, found = _image_check(home)
    checks.append(image)
    checks.append(_leaks_check(home))
    if able and found is not None:
        checks += _sandbox_checks(found)
    able = _able(checks)
    if as_json:
        value = {"version": render.version(), "able": able, "checks": [asdict(c) for c in checks]}
        print(json.dumps(value, indent=2))
    else:
        _print(checks, able=able)
    return 0 if able else 1


def _able(checks: list[Check]) -> bool:
    return all(check.ok for check in checks if check.required)


def _image_check(home: Path) -> tuple[Check, str | None]:
    """Return the check, and the name of an image that a sandbox can be tried with."""
    from coldframe.images.store import ImageStore

    names: list[str] = []
    try:
        (home / "images").stat()
        with ImageStore(home / "images") as store:
            names = [record.name for record in store.list()]
    except FileNotFoundError:
        pass  # nothing was made yet
    except (ColdframeError, OSError) as error:
        remedy = "run as root" if os.geteuid() != 0 else f"look at {home / 'images'}"
        found = describe_refusal(error) if isinstance(error, OSError) else str(error)
        return Check("images", False, render.sentence(found), remedy, False), None
    missing = [name for name in WANTED_IMAGES if name not in names]
    detail = f"{len(names)} in the store" + (f", but not {', '.join(missing)}" if missing else "")
    remedy = "; ".join(f"coldframe image bootstrap {name}" for name in missing)
    usable = [name for name in WANTED_IMAGES if name in names]
    check = Check("images", not missing, detail, remedy, required=False)
    return check, usable[0] if usable else None


def _leaks_check(home: Path) -> Check:
    try:
        machine.require_root("doctor")
    except CapabilityError as error:
        return Check("leaks", False, "cannot be seen", render.sentence(str(error)), False)
    leaks = len(machine.survey(home).reapable)
    detail = f"{leaks} left by nodes that are dead" if leaks else "nothing is left of dead nodes"
    return Check("leaks", not leaks, detail, "coldframe gc" if leaks else "", required=False)


def _sandbox_checks(image: str) -> list[Check]:
    try:
        detail, able = asyncio.run(_try_sandbox(image))
    except ColdframeError as error:
        return [Check("sandbox", False, render.sentence(str(error)), "report it with this output")]
    return [Check("sandbox", True, detail), storage_check(able)]


def storage_check(able: Capabilities) -> Check:
    """Say where uppers live, and why not where they would live best."""
    why = str(able.details.get("storage_fallback") or "")
    if not why:
        return Check("storage", True, f"uppers on {able.storage}", required=False)
    detail = f"uppers on {able.storage}, since others do not work here: {render.sentence(why)}"
    return Check("storage", False, detail, "see what the missing kinds need, above", required=False)


async def _try_sandbox(image: str) -> tuple[str, Capabilities]:
    from coldframe.client import AsyncSandboxClient

    async with (
        AsyncSandboxClient(in_process=True) as client,
        await client.create_sandbox(image, ttl_s=60) as sandbox,
    ):
        result = await sandbox.exec(["/bin/sh", "-c", "exit 7"], deadline_s=30)
        able = await client.capabilities()
    if result.exit_code != 7:
        raise ColdframeError(f"a command in {image} ended with {result.reason}, not with exit 7")
    limits = ", ".join(sorted(able.limits))
    return f"made one of {image}, ran a command ({able.runtime}; limits: {limits})", able


def _state(check: Check) -> str:
    if check.ok:
        return "ok"
    return "MISSING" if check.required else "wanted"


def _print(checks: list[Check], *, able: bool) -> None:
    rows = [(_state(check), check.name, check.detail) for check in checks]
    print(render.table(("STATE", "WHAT", "FOUND"), rows))
    for check in checks:
        if not check.ok:
            print(f"\n{check.name}: {render.safe(check.detail)}\n  fix: {check.remedy}")
    print("\nthis machine can run sandboxes" if able else "\nthis machine cannot run sandboxes yet")
