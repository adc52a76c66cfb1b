"""Tell a model which skills a task offers: a list by a named rule with a version.

A skill is a directory with a SKILL.md, whose front matter has `name` and `description`. The
model is shown those and the path; it reads the rest itself when it wants to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from coldframe.protocol.errors import FileError, HarnessError, PathNotFoundError
from coldframe.protocol.models import FileKind
from coldframe.protocol.text import excerpt

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox

SKILLS_LIST = "skills_list@2"
"""By directory name, at most 200, one line each: names cut at 100 characters, descriptions at
1,000; a path that would not stay on its line is shown quoted, with escapes."""
MAX_SKILLS = 200
MAX_NAME = 100
MAX_DESCRIPTION = 1000
_FRONT_BYTES = 64 * 1024
_FIELD = re.compile(r"(?P<key>[A-Za-z0-9_-]+):(?:\s+(?P<value>.*))?")
_HEAD = "Skills are instructions for certain kinds of work. Read the file of one that fits:"


async def list_skills(sandbox: AsyncSandbox, directory: str) -> str | None:
    """Return the list of the skills in a directory of the sandbox, or None if it is empty.

    Raises:
        HarnessError: the directory is not there, or holds too many.
    """
    try:
        entries = await sandbox.files.list(directory)
    except FileError as error:
        raise HarnessError(f"[environment] skills_dir: {error}") from error
    lines: list[str] = []
    for name in sorted(one.name for one in entries if one.stat.kind is FileKind.DIRECTORY):
        path = f"{directory.rstrip('/')}/{name.decode('utf-8', 'replace')}/SKILL.md"
        front = await _front_matter(sandbox, path)
        if front is not None:
            if len(lines) == MAX_SKILLS:
                raise HarnessError(f"{directory}: more than the {MAX_SKILLS} skills to be shown")
            lines.append(_line(front, path))
    return "\n".join([_HEAD, *lines]) if lines else None


def _line(front: Mapping[str, str], path: str) -> str:
    shown = path if path.isprintable() else repr(path)
    name = front.get("name") or shown.split("/")[-2]
    return f"- {name[:MAX_NAME]}: {front.get('description', '')[:MAX_DESCRIPTION]} ({shown})"


async def _front_matter(sandbox: AsyncSandbox, path: str) -> dict[str, str] | None:
    """Return the fields that a SKILL.md begins with; None if there is no such file."""
    try:
        text = (await sandbox.files.read(path, length=_FRONT_BYTES)).decode("utf-8", "replace")
    except PathNotFoundError:
        return None
    except FileError as error:
        raise HarnessError(f"{excerpt(path)}: {error}") from error
    return front_matter(text)


def front_matter(text: str) -> dict[str, str]:
    """Return the plain fields between the `---` lines at the beginning of a text.

    Values are put on one line, without quotes and without the marks of folded text.
    """
    lines = text.splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    fields: dict[str, list[str]] = {}
    latest: list[str] = []
    for line in lines[1:]:
        if line.strip() == "---":
            return {key: _plain(" ".join(words)) for key, words in fields.items()}
        field = _FIELD.fullmatch(line.rstrip())
        if field is not None:
            value = (field["value"] or "").strip()
            latest = fields.setdefault(field["key"], [])
            latest.append("" if re.fullmatch(r"[>|][+-]?", value) else value)
        elif line[:1] in " \t":
            latest.append(line.strip())
    return {}


def _plain(value: str) -> str:
    value = " ".join(value.split())
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value
