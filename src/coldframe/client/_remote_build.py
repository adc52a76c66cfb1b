"""What a service is sent to build an image: the context as a tar, and words about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from coldframe.client._content import Repeated
from coldframe.client._transfer import packed
from coldframe.protocol.errors import InvalidRequestError

_ROOT = (0, 0)


@dataclass(frozen=True)
class Built:
    """See `BuiltImage`."""

    digest: str


def parameters(
    name: str,
    context: Path,
    dockerfile: Path | None,
    build_args: Mapping[str, str] | None,
    target: str | None,
) -> list[tuple[str, str]]:
    """Return the query of a build.

    Raises:
        InvalidRequestError: the Dockerfile is not in the context, which is all that is sent.
    """
    asked = [("name", name)]
    if dockerfile is not None:
        try:
            within = dockerfile.resolve().relative_to(context.resolve())
        except ValueError:
            raise InvalidRequestError(
                f"dockerfile {str(dockerfile)!r} is not in the context {str(context)!r}, which is "
                "all that a service is sent"
            ) from None
        asked.append(("dockerfile", str(within)))
    if target is not None:
        asked.append(("target", target))
    asked += [("build_arg", f"{key}={value}") for key, value in (build_args or {}).items()]
    return asked


def content(context: Path) -> Repeated:
    """Return the context as a tar. Raises as `pack` does, when it is read."""
    return Repeated(partial(packed, context, _ROOT))
