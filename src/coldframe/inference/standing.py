"""What the administrator has said of the policy, kept beside the journals over a kill.

Without it a proxy that is started again would answer while weights are changed, and book the calls
of the newest weights under those that it was first started with.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from coldframe.inference.proxy import Proxy
from coldframe.protocol.errors import InvalidRequestError
from coldframe.trajectories.store import write_atomic

STANDING_FILE = "policy.json"


class _Standing(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    begun_with: str | None
    """Digest of the weights by the settings. Others were said since: this counts no more."""
    policy_version: str | None
    paused_for_s: float | None


def keep(directory: Path, proxy: Proxy) -> None:
    """Write down which policy answers, and whether it is paused."""
    standing = _Standing(
        begun_with=proxy.settings.policy_version,
        policy_version=proxy.policy_version,
        paused_for_s=proxy.paused_for_s,
    )
    write_atomic(directory / STANDING_FILE, standing.model_dump_json().encode() + b"\n")


def restore(directory: Path, proxy: Proxy) -> None:
    """Go on as the administrator has said last, unless the settings name other weights since.

    Raises:
        InvalidRequestError: the file is damaged.
    """
    path = directory / STANDING_FILE
    try:
        standing = _Standing.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return
    except ValidationError:
        raise InvalidRequestError(
            f"{path}: does not say which policy answers; remove it, and name the weights that "
            "answer now with --policy-version"
        ) from None
    if standing.begun_with == proxy.settings.policy_version:
        proxy.resume(standing.policy_version)
        proxy.paused_for_s = standing.paused_for_s
