"""What a native sandbox is made of, as its maker hands it over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from coldframe.host.rootfs import RootFiles
from coldframe.host.spawner import Created, Spawner
from coldframe.host.storage_base import Storage
from coldframe.runtimes.native_egress import NativeEgress
from coldframe.runtimes.native_keeping import Keeping
from coldframe.runtimes.native_request import Planner


@dataclass(frozen=True)
class Parts:
    """What a sandbox is made of."""

    spawner: Spawner
    created: Created
    id_base: int
    files: RootFiles
    planner: Planner
    storage: Storage
    egress: NativeEgress
    layers: tuple[Path, ...]
    """Trees of the image, top first."""
    cgroups: Mapping[str, Path]
    """The node's directory in each hierarchy."""
    command_ended: Callable[[], None]
    """Told of each command's end."""
    ended: bool
    """Whether its pid 1 had exited when it was handed over: its end may have been told already."""
    keeping: Keeping | None
    """None: it ends with this process."""
