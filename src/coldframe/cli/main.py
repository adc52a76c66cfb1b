"""Entry of the `coldframe` command: find the room that was asked for, and say errors plainly.

Only the room named on the command line is imported, so that `--help` is fast and a room
that cannot be imported takes no other down with it.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from coldframe.cli import render
from coldframe.cli.variables import misspelt
from coldframe.protocol.errors import (
    ColdframeError,
    ImageError,
    NotExecutedError,
    PathNotFoundError,
    Side,
)
from coldframe.protocol.text import lacking

if TYPE_CHECKING:
    import typer

EXIT_FAILED = 1
EXIT_CALLER = 2
EXIT_INTERRUPTED = 130

_TYPED_WRONGLY = (NotExecutedError, PathNotFoundError)
"""What an agent does in its sandbox is its own fault; here somebody has typed what is not there."""


@dataclass(frozen=True)
class Room:
    """Where one command lives: a `typer.Typer` (a group) or a function (one command)."""

    target: str
    help: str


ROOMS: dict[str, Room] = {
    "doctor": Room(
        "coldframe.cli.doctor:doctor",
        "Say what this machine can do, what is missing, and the command that fixes it.",
    ),
    "run": Room("coldframe.cli.run:run", "Run one command in a fresh sandbox of an image."),
    "serve": Room("coldframe.cli.serve:serve", "Serve this machine's node to clients."),
    "node": Room("coldframe.cli.node:app", "See, stop and upgrade the machine's node."),
    "key": Room("coldframe.cli.key:app", "Make, list and revoke keys of the service."),
    "sandbox": Room(
        "coldframe.cli.sandbox:app",
        "Make, use and delete sandboxes, of the machine's node or a service.",
    ),
    "events": Room("coldframe.cli.events:events", "Print what becomes of sandboxes."),
    "image": Room("coldframe.cli.image:app", "Make, import, list and remove images."),
    "task": Room("coldframe.cli.task:app", "Write tasks, and check that they are honest."),
    "rollout": Room("coldframe.cli.rollout:app", "Run tasks and look at their results."),
    "inference": Room(
        "coldframe.cli.inference:app", "Serve a model's engine, and keep its exact tokens."
    ),
    "rewards": Room("coldframe.cli.rewards:app", "Compute rewards again by a schema, list drift."),
    "splits": Room("coldframe.cli.splits:app", "Split tasks by group, and compare splits."),
    "import": Room("coldframe.cli.imports:app", "Make runs of what other runners left."),
    "export": Room("coldframe.cli.export:app", "Write attempts in the formats of others."),
    "ledger": Room(
        "coldframe.cli.ledger:ledger",
        "Account for every sandbox of this machine's nodes, against the kernel.",
    ),
    "gc": Room("coldframe.cli.gc:gc", "Reap what killed processes left behind."),
}


class RoomUnavailableError(ColdframeError):
    """A room of the command line cannot be imported on this installation."""

    code = "room_unavailable"
    side = Side.STARTUP


def load(name: str, room: Room) -> Any:
    """Import the room and return its Typer or function.

    Raises:
        RoomUnavailableError: it, or something that it needs, cannot be imported.
    """
    module_name, _, attribute = room.target.partition(":")
    try:
        return getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise _unavailable(name, error) from error


def _unavailable(name: str | None, error: Exception) -> RoomUnavailableError:
    extra = {"serve": "cli,gateway", "inference": "cli,inference"}.get(name or "", "cli")
    return RoomUnavailableError(lacking(" ".join(filter(None, ("coldframe", name))), error, extra))


def _stub(summary: str) -> Callable[[], None]:
    def listed_only() -> None:
        raise AssertionError("a stub is listed, never run")

    listed_only.__doc__ = summary
    return listed_only


def build(wanted: str | None) -> typer.Typer:
    """Return the root command with `wanted` loaded and every other room listed only.

    Raises:
        RoomUnavailableError: what it needs is not installed.
    """
    try:
        import typer

        from coldframe.cli.groups import group
    except ImportError as error:
        raise _unavailable(wanted, error) from error

    app = group(
        name="coldframe",
        help=(
            "Isolated Linux sandboxes, rollouts and trajectories for training language-model "
            "agents."
        ),
        pretty_exceptions_enable=False,
    )

    def show_version(value: bool) -> None:
        if value:
            print(f"coldframe {render.version()}")
            raise typer.Exit

    @app.callback()
    def root(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Show the version."
        ),
        debug: bool = typer.Option(False, "--debug", help="Show tracebacks of failures."),
    ) -> None:
        del version, debug  # --debug is taken out of the arguments before they are parsed

    for name, room in ROOMS.items():
        target = load(name, room) if name == wanted else _stub(room.help)
        if isinstance(target, typer.Typer):
            app.add_typer(target, name=name, help=room.help)
        else:
            app.command(name, help=target.__doc__ or room.help, short_help=room.help)(target)
    return app


def _take_debug(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """Take `--debug` out, wherever it stands before `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    head = [argument for argument in arguments[:end] if argument != "--debug"]
    return len(head) != end, head + list(arguments[end:])


def _where_to_read(error: BaseException) -> str:
    """Name the help of the command that was used wrongly."""
    context = getattr(error, "ctx", None)
    if context is None:
        return "see --help"
    path = context.command_path
    takes_command = any("-- CMD" in (one.metavar or "") for one in context.command.params)
    if takes_command and hasattr(error, "option_name"):
        return f"options of CMD stand after --; see {path} --help"
    return f"see {path} --help"


def explain(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the one sentence that an exception deserves."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted"
    if isinstance(error, ColdframeError):
        mistake = error.side is Side.CALLER or isinstance(error, _TYPED_WRONGLY)
        code = EXIT_CALLER if mistake else EXIT_FAILED
        # What a build step printed is read by lines.
        told = render.block if isinstance(error, ImageError) else render.sentence
        return code, told(str(error))
    usage = getattr(error, "format_message", None)
    if usage is not None:
        return EXIT_CALLER, f"{render.sentence(usage()).rstrip('.')} ({_where_to_read(error)})"
    problems = getattr(error, "errors", None)
    if callable(problems) and isinstance(error, ValueError):
        return EXIT_CALLER, "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'request'}: {one['msg']}" for one in problems()
        )
    if isinstance(error, OSError):
        return EXIT_FAILED, render.sentence(str(error))
    name = type(error).__name__
    return EXIT_FAILED, (
        f"unexpected {name}: {render.sentence(str(error))}; "
        "run again with --debug and report the traceback"
    )


def _open_standard_streams() -> None:
    """Put /dev/null where we were started without a standard stream.

    Else a descriptor of our own gets its number, and the sandbox's output goes there.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 success, 1 a failure, 2 the caller's own mistake, 130 interrupted. What runs a command in a
    sandbox passes the command's own exit code through; see `attach.failed`.
    """
    _open_standard_streams()
    for warning in misspelt():
        print(f"coldframe: {render.sentence(warning)}", file=sys.stderr)
    debug, words = _take_debug(list(sys.argv[1:] if arguments is None else arguments))
    wanted = next((word for word in words if not word.startswith("-")), None)
    try:
        outcome = build(wanted)(words, prog_name="coldframe", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone (`coldframe ledger | head -1`): nothing is left to say, and the
        # interpreter must not try to flush again.
        render.discard_stdout()
        return EXIT_FAILED
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the last handler there is
        if debug:
            traceback.print_exception(error)
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error, file=sys.stderr)
            return EXIT_CALLER
        code, message = explain(error)
        print(f"coldframe: {message}", file=sys.stderr)
        return code
    return outcome if isinstance(outcome, int) else 0


if __name__ == "__main__":
    sys.exit(main())
