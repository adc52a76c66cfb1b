"""The entry: rooms are found lazily, errors are one sentence with the right exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import BaseModel, Field

from coldframe.cli import main as entry
from coldframe.protocol.errors import CreateError, ImageNotFoundError


def _modules_after(arguments: list[str]) -> set[str]:
    script = (
        "import sys\n"
        "from coldframe.cli.main import main\n"
        f"code = main({arguments!r})\n"
        "print('\\n'.join(sys.modules), file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(ended.stderr.split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_of_the_whole_imports_no_room(arguments: list[str]) -> None:
    """`coldframe --help` is typed by people: it must not load a node to list its commands."""
    loaded = _modules_after(arguments)

    heavy = {"pydantic", "httpx", "structlog", "coldframe.node", "coldframe.client"}
    heavy |= {room.target.partition(":")[0] for room in entry.ROOMS.values()}
    assert loaded & heavy == set()


@pytest.mark.parametrize("name", [None, *entry.ROOMS])
def test_help_cuts_no_command_off(
    name: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a sentence does not say what a command is for."""
    monkeypatch.setenv("COLUMNS", "60")
    assert entry.main([*([name] if name else []), "--help"]) == 0
    _, _, commands = capsys.readouterr().out.partition("Commands:")
    assert "..." not in commands


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """What is not listed is not found."""
    assert entry.main(["--help"]) == 0

    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in entry.ROOMS)


def test_version_names_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    """A bug report begins with it."""
    assert entry.main(["--version"]) == 0

    assert capsys.readouterr().out.startswith("coldframe ")


@pytest.mark.parametrize("name", sorted(entry.ROOMS))
def test_every_listed_command_can_be_loaded(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The table names modules as text; a renamed one would be noticed by users only."""
    assert entry.main([name, "--help"]) == 0

    assert f"coldframe {name}" in capsys.readouterr().out


def test_broken_room_takes_no_other_down(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An installation without one extra still has its other commands."""
    monkeypatch.setitem(entry.ROOMS, "image", entry.Room("coldframe.cli.absent:app", "gone"))

    assert entry.main(["image", "ls"]) == entry.EXIT_FAILED
    assert capsys.readouterr().err.startswith("coldframe: coldframe image lacks a library")
    assert entry.main(["--help"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [["bogus"], ["--bogus"], ["run", "--bogus"], ["run", "x", "--cpu", "many", "--", "y"]],
)
def test_usage_error_is_one_sentence_and_exit_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts tell their own mistake from a failure of the platform by the exit code."""
    assert entry.main(arguments) == entry.EXIT_CALLER

    said = capsys.readouterr().err
    assert said.startswith("coldframe: ")
    assert len(said.splitlines()) == 1


class _Limits(BaseModel):
    cpu: float = Field(gt=0)


def _validation_error() -> Exception:
    with pytest.raises(ValueError) as caught:
        _Limits(cpu=-1)
    return caught.value


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ImageNotFoundError("no image 'x'; make it"), 2, "no image 'x'; make it"),
        (CreateError("no\nroom"), 1, "no room"),
        (PermissionError(13, "Permission denied", "/x"), 1, "Permission denied: '/x'"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (_validation_error(), 2, "cpu: Input should be greater than 0"),
        (ZeroDivisionError("oops"), 1, "unexpected ZeroDivisionError: oops"),
    ],
)
def test_explain_gives_each_failure_its_exit_code(
    error: BaseException, code: int, text: str
) -> None:
    """2 is the caller's own mistake, 1 is anything else."""
    found, said = entry.explain(error)

    assert found == code
    assert text in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "image", "ls", "-l"], "options of CMD stand after --; see coldframe run --help"),
        (["run"], "(see coldframe run --help)"),
        (["sandbox", "ls", "box"], "(see coldframe sandbox ls --help)"),
    ],
)
def test_wrong_use_names_the_help_of_that_command(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help of the whole program does not tell what was done wrong."""
    assert entry.main(words) == entry.EXIT_CALLER
    assert said in capsys.readouterr().err


def test_unexpected_error_shows_its_traceback_with_debug_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A traceback helps who asked for it and buries the sentence for all others."""

    def broken(wanted: str | None) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(entry, "build", broken)

    assert entry.main(["ledger"]) == entry.EXIT_FAILED
    assert "Traceback" not in capsys.readouterr().err
    assert entry.main(["ledger", "--debug"]) == entry.EXIT_FAILED
    assert "Traceback" in capsys.readouterr().err


def test_debug_behind_the_dashes_belongs_to_the_command() -> None:
    """`run IMAGE -- tool --debug` is the tool's own option."""
    assert entry._take_debug(["run", "x", "--", "tool", "--debug"]) == (
        False,
        ["run", "x", "--", "tool", "--debug"],
    )
    assert entry._take_debug(["run", "--debug", "x"]) == (True, ["run", "x"])


def test_reader_that_goes_away_is_no_error_message(tmp_path: object) -> None:
    """`coldframe image ls | head -1` is how people use it."""
    script = "from coldframe.cli.main import main; import sys; sys.exit(main(['--help']))"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()

    assert b"Traceback" not in said
    assert b"coldframe:" not in said


@pytest.mark.parametrize(
    ("words", "extra"),
    [(["run", "x"], "cli"), (["serve"], "cli,gateway"), (["--help"], "cli")],
)
def test_installation_of_the_sdk_alone_names_what_brings_the_command(
    words: list[str], extra: str
) -> None:
    """`pip install CLONE` has the command too; a traceback to report is no remedy."""
    code = "import sys; sys.modules['typer'] = None\nfrom coldframe.cli.main import main\n"
    ran = subprocess.run(
        [sys.executable, "-c", f"{code}sys.exit(main({words!r}))"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert "lacks a library" in ran.stderr
    assert f"pip install '/path/to/clone[{extra}]'" in ran.stderr
