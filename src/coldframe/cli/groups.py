"""Groups of commands, all made alike."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

_WHOLE = 1 << 16


class _Group(TyperGroup):
    """Lists each command with all of its first sentence: cut off, it says nothing."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands of a group's help."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, one.get_short_help_str(_WHOLE)) for name, one in commands if one]
            )


def group(**options: Any) -> typer.Typer:
    """Return an empty group; options as of `typer.Typer`."""
    return typer.Typer(
        cls=_Group, no_args_is_help=True, rich_markup_mode=None, add_completion=False, **options
    )
