"""A persistent shell as an object: state stays, codes are true, output is exact."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator

import pytest

from coldframe import (
    AsyncSandbox,
    InvalidRequestError,
    NotExecutedError,
    Reason,
    Sandbox,
    SandboxClient,
    Session,
    SessionEndedError,
)
from coldframe.images.base import Image
from tests.fixtures.waiting import until_asked

SHELLS = ["/bin/sh", "/bin/bash"]


@pytest.fixture(params=SHELLS)
def session(sandbox: Sandbox, request: pytest.FixtureRequest) -> Iterator[Session]:
    session = sandbox.session(request.param)
    yield session
    session.kill()


def test_session_keeps_directory_variables_and_functions(session: Session) -> None:
    """What a session is for."""
    session.exec("cd /tmp; export A=1; b=2; f() { echo f:$1; return 7; }; set -- x y")
    result = session.exec("pwd; echo $A $b $#; f z")

    assert result.stdout == b"/tmp\n1 2 2\nf:z\n"
    assert result.exit_code == 7


def test_session_codes_are_true(session: Session) -> None:
    """A prompt scraper that is off by one reports the code of another command."""
    codes = [session.exec(command).exit_code for command in ("true", "false", "(exit 200)", ":")]
    assert codes == [0, 1, 200, 0]


def test_session_last_code_is_seen_by_the_next_command(session: Session) -> None:
    """Models write `echo $?` as a command of its own."""
    session.exec("(exit 9)")
    assert session.exec("echo $?").stdout == b"9\n"
    assert session.exec("echo $?").stdout == b"0\n"


def test_session_output_has_no_markers_and_misses_none(session: Session) -> None:
    """Bytes come as they are, with no newline, NULs and all, and belong to their command."""
    result = session.exec(b"printf 'a\\000\\377'; printf e >&2; printf '\xfe'")
    assert (result.stdout, result.stderr) == (b"a\x00\xff\xfe", b"e")
    assert session.exec("echo next").stdout == b"next\n"


@pytest.mark.parametrize(
    "command",
    [
        'echo it\\\'s "q"',
        "echo 'a'\\''b'",
        "cat <<'EOF'\nit's $x\nEOF",
        "# only a comment",
        "echo one \\\ntwo",
        "for i in 1 2; do\n  echo $i\ndone",
        "echo '\\n' `echo b` $((1 + 2))",
    ],
)
def test_session_runs_text_as_the_shell_would(sandbox: Sandbox, command: str) -> None:
    """Quoting for the session must not change what a command means."""
    expected = sandbox.exec(command)
    with sandbox.session() as session:
        result = session.exec(command)
    assert (result.stdout, result.exit_code) == (expected.stdout, expected.exit_code)


def test_session_survives_syntax_errors(session: Session) -> None:
    """A model's typo must not cost the session."""
    session.exec("x=kept")
    result = session.exec("if true; then (")
    assert result.exit_code == 2
    assert b"yntax error" in result.stderr
    assert session.exec("echo $x").stdout == b"kept\n"


def test_session_command_reads_end_of_file(session: Session) -> None:
    """A command that reads stdin must not eat the session's next commands."""
    assert session.exec("cat; echo end").stdout == b"end\n"
    assert session.exec("echo next").stdout == b"next\n"


def test_session_status_pipe_is_closed_to_commands(session: Session) -> None:
    """A command that writes to descriptor 3 must not forge or disturb a status."""
    assert session.exec("echo '0' >&3").exit_code != 0
    assert session.exec("(exit 4)").exit_code == 4


def test_session_env_is_for_one_command(session: Session) -> None:
    """Secrets for one command must not stay in the shell."""
    result = session.exec('echo "$V"; env | grep ^V=; cd /tmp', env={"V": 'it\'s "x" $y'})
    assert result.stdout == b'it\'s "x" $y\nV=it\'s "x" $y\n'
    assert session.exec('pwd; echo "[$V]"').stdout == b"/tmp\n[]\n"


def test_session_env_name_that_is_none_is_refused(session: Session) -> None:
    """It would be run as a command."""
    with pytest.raises(InvalidRequestError, match="a;b"):
        session.exec("true", env={"a;b": "x"})
    assert session.exec("echo ok").ok


def test_session_background_job_does_not_hold_the_call(session: Session) -> None:
    """`server &` is how agents start servers; its output comes later, and is not lost."""
    result = session.exec("{ until [ -e go ]; do sleep 0.02; done; echo late; } & echo now")
    assert result.stdout == b"now\n"
    assert session.exec("touch go; wait").stdout == b"late\n"


def test_session_deadline_kills_the_command_and_keeps_the_shell(session: Session) -> None:
    """One hanging command must not cost the state of a whole episode."""
    session.exec("x=kept; cd /tmp")
    result = session.exec("echo begun; sleep 60; echo AFTER", deadline_s=1)

    assert (result.reason, result.stdout) == (Reason.DEADLINE, b"begun\n")
    assert session.exec("pwd; echo $x").stdout == b"/tmp\nkept\n"


@pytest.mark.parametrize(
    "command", ["while :; do :; done", "while :; do sleep 9; done", "(sleep 60); echo AFTER"]
)
def test_session_deadline_stops_the_rest_of_the_line(session: Session, command: str) -> None:
    """`sleep 99; rm x`: what was killed must not go on with its next part."""
    result = session.exec(command, deadline_s=0.3)
    assert (result.reason, result.stdout) == (Reason.DEADLINE, b"")
    assert session.exec("echo alive").stdout == b"alive\n"


def test_session_deadline_in_a_function_stops_all_of_it(session: Session) -> None:
    """bash cannot leave nested functions without ending; nothing may run on in either shell."""
    result = session.exec("g() { sleep 60; echo AFTER; }; g; echo AFTER2", deadline_s=0.3)

    assert (result.reason, result.stdout) == (Reason.DEADLINE, b"")
    if session.ended is None:
        assert session.exec("echo alive").stdout == b"alive\n"
    else:
        with pytest.raises(SessionEndedError):
            session.exec("echo alive")


def test_session_exit_reports_its_code_and_ends(session: Session) -> None:
    """The model closed its terminal: that is a result, and the next call says so."""
    result = session.exec("echo bye; exit 5")
    assert (result.stdout, result.exit_code, result.reason) == (b"bye\n", 5, Reason.EXIT)
    assert session.ended is not None
    with pytest.raises(SessionEndedError, match="status 5"):
        session.exec("true")


def test_session_large_output_is_whole_by_length_and_digest(session: Session) -> None:
    """More than the window, read while it comes."""
    result = session.exec("seq 1 400000", window_bytes=1000)
    whole = b"".join(b"%d\n" % i for i in range(1, 400001))

    assert result.out.total_bytes == len(whole)
    assert result.out.sha256 == hashlib.sha256(whole).hexdigest()
    assert result.out.head == whole[:500]
    assert result.out.tail == whole[-500:]


def test_session_command_larger_than_a_pipe_is_run(session: Session) -> None:
    """Models write whole files by here-documents."""
    body = "".join(f'line {i} it\'s "$x"\n' for i in range(10_000))
    result = session.exec(f"wc -c <<'EOF'\n{body}EOF")
    assert result.stdout.split() == [b"%d" % len(body)]


def test_session_leaves_background_jobs_when_closed(sandbox: Sandbox) -> None:
    """A service that the agent started on purpose must be there for the verifier."""
    with sandbox.session() as session:
        session.exec("sleep 60 &")
    assert session.ended is not None
    assert len(sandbox.processes()) == 1
    sandbox.kill_processes()


def test_session_kill_ends_everything_of_it(sandbox: Sandbox) -> None:
    """The harness ends before the verifier begins."""
    session = sandbox.session()
    session.exec("sleep 60 & (setsid sleep 61 &)")
    session.kill()
    assert sandbox.processes() == ()


def test_session_with_options_starts_there(sandbox: Sandbox) -> None:
    """Directory and environment of the shell itself."""
    sandbox.files.mkdir("/work")
    with sandbox.session(env={"A": "1"}, cwd="/work") as session:
        assert session.exec("echo $A ${PWD##*/}").stdout == b"1 work\n"


def test_session_without_such_a_shell_is_not_executed(sandbox: Sandbox) -> None:
    """An image without bash must be told from one whose bash failed."""
    with pytest.raises(NotExecutedError):
        sandbox.session("/no/shell")


def test_session_program_that_is_no_shell_is_refused(sandbox: Sandbox) -> None:
    """It must not hang for ever waiting for an answer."""
    with pytest.raises(SessionEndedError, match="ended at once: is it a POSIX shell"):
        sandbox.session("/bin/true")


def test_session_program_that_is_silent_is_refused_soon(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cat` takes every line and answers none; the message says how long was waited."""
    monkeypatch.setattr("coldframe.node.session.START_DEADLINE_S", 1.0)  # a service has its own
    with pytest.raises(SessionEndedError, match=r"within [15] s: is it a POSIX shell"):
        sandbox.session("/bin/cat")
    assert sandbox.processes() == ()


@pytest.mark.parametrize("command", ["exec sleep 70", "exec 3>&-; exec sleep 70"])
def test_session_deadline_ends_what_took_the_shells_place(session: Session, command: str) -> None:
    """Nothing reports any more then, but the deadline holds, and the output so far is there."""
    result = session.exec(f"echo begun; {command}", deadline_s=1)

    assert (result.reason, result.stdout) == (Reason.DEADLINE, b"begun\n")
    assert session.ended is not None
    with pytest.raises(SessionEndedError):
        session.exec("true")


def test_session_deadline_ends_a_shell_that_cannot_report(sandbox: Sandbox) -> None:
    """dash needs a descriptor to report with; without one it waits for its next line for ever."""
    session = sandbox.session("/bin/sh")
    result = session.exec("echo begun; ulimit -n 3", deadline_s=1)

    assert (result.reason, result.stdout) == (Reason.DEADLINE, b"begun\n")
    assert session.ended is not None
    assert sandbox.processes() == ()


def test_session_program_in_the_shells_place_gives_its_code(session: Session) -> None:
    """`exec make` is a way to end a shell: the code is the program's."""
    result = session.exec("exec sh -c 'sleep 0.1; echo made; exit 6'")

    assert (result.reason, result.exit_code, result.stdout) == (Reason.EXIT, 6, b"made\n")
    assert session.ended is not None


@pytest.mark.parametrize("shell", SHELLS)
async def test_session_cancelled_after_the_shell_was_replaced_ends(
    async_sandbox: AsyncSandbox, shell: str
) -> None:
    """A cancelled rollout must not wait for what its agent left in the shell's place."""
    session = await async_sandbox.session(shell)
    running = asyncio.ensure_future(session.exec("exec sleep 70", deadline_s=None))

    async def replaced() -> bool:
        return [process.name for process in await async_sandbox.processes()] == ["sleep"]

    await until_asked(replaced)
    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running
    assert await async_sandbox.processes() == ()


def test_session_env_value_may_be_any_text(session: Session) -> None:
    """What the session's own script is made of must not show through."""
    text = "COMMAND NONCE ENV %(nonce)s %s"
    assert session.exec('printf %s "$V"', env={"V": text}).stdout == text.encode()


def test_session_trace_shows_the_commands_and_not_the_session(session: Session) -> None:
    """`set -x` is for the user: how the session learns the code is not part of it."""
    session.exec("set -x")
    assert b"printf" not in session.exec("echo shown").stderr
    assert b"+ echo shown\n" in session.exec("echo shown").stderr


def test_session_dies_with_its_sandbox(sandbox: Sandbox) -> None:
    """A call in flight ends; the next one says why."""
    session = sandbox.session()
    session.exec("true")
    sandbox.delete()
    with pytest.raises(SessionEndedError, match="sandbox_gone"):
        session.exec("true")


@pytest.mark.root
def test_session_in_busybox_behaves_alike(
    native_client: SandboxClient, busybox_image: Image
) -> None:
    """The third shell that images bring: state, codes, syntax errors and deadlines."""
    with native_client.create_sandbox(busybox_image.name) as sandbox:
        session = sandbox.session()
        session.exec("cd /tmp; x=kept; f() { sleep 60; echo AFTER; }")
        assert session.exec("if (").exit_code == 2
        assert session.exec("cat; (exit 7)").exit_code == 7
        assert session.exec("f; echo AFTER2", deadline_s=0.3).stdout == b""
        assert session.exec("echo $x; pwd").stdout == b"kept\n/tmp\n"
        session.exec("sleep 60 &")
        session.kill()
        assert sandbox.processes() == ()


@pytest.mark.root
@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    "damage",
    ["rm /dev/null; mkfifo /dev/null", "ln -sf /dev/tty /dev/null", "rm -rf /dev/null /dev/fd"],
)
def test_session_works_without_the_sandboxs_dev_null(
    native_client: SandboxClient, shell: str, damage: str
) -> None:
    """An agent's `rm` or redirection must not cost the session, nor the verifier's one later."""
    with native_client.create_sandbox("debian:bookworm") as sandbox:
        with sandbox.session(shell) as session:
            assert session.exec(damage).ok
            assert session.exec("cat; x=kept; (exit 3)").exit_code == 3
            assert session.exec("sleep 60; echo AFTER", deadline_s=0.3).reason is Reason.DEADLINE
            assert session.exec("echo $x").stdout == b"kept\n"
        with sandbox.session(shell) as session:
            result = session.exec("cat; echo alive")
            assert (result.stdout, result.stderr) == (b"alive\n", b"")
