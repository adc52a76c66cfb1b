"""Open the node of this process: the only module of this room that knows the node's room."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coldframe.client._link import NodeLink, NodeOpener


def in_process(home: str | Path | None, runtime: str | None) -> NodeOpener:
    """Return what opens a node in this process. None: what the environment says."""
    return partial(_open, home, runtime)


async def _open(home: str | Path | None, runtime: str | None) -> NodeLink:
    """Start a node; it and its sandboxes end when the link is closed.

    Raises:
        CapabilityError: this machine lacks something; the message names the remedy.
        InvalidRequestError: a setting in the environment is wrong.
    """
    from coldframe.node.node import Node
    from coldframe.node.settings import NodeSettings

    settings = NodeSettings.from_environment()
    if home is not None:
        settings = dataclasses.replace(settings, home=Path(home))
    if runtime is not None:
        settings = dataclasses.replace(settings, runtime=runtime)
    node = Node(settings)
    await node.start()
    return node
