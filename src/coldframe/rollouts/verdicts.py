"""Find the verdict that test.sh has written: in a guarded directory, or by the file API.

A guarded file counts only if the node vouches for it; what others wrote, or tried to, is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from coldframe.protocol.errors import (
    ColdframeError,
    FileError,
    GradingPreventedError,
    PathNotFoundError,
    RewardInvalidError,
    RewardMissingError,
    VerifierError,
)
from coldframe.protocol.models import (
    ExecResult,
    FileKind,
    GuardRefusal,
    GuardReport,
)
from coldframe.protocol.text import excerpt
from coldframe.rollouts.integrity import LISTED, Tampering
from coldframe.rollouts.places import LOGS, VERIFIER_LOGS, kind_of
from coldframe.rollouts.rewards import MAX_REWARD_BYTES
from coldframe.rollouts.sift import is_in

if TYPE_CHECKING:
    from coldframe.client import AsyncSandbox

NAMES = ("reward.json", "reward.txt")
"""The first that is there is the verdict."""
REFUSED = "reward_refused"
LATE_NS = 1_000_000
"""Later than this after test.sh's end, a change is somebody else's."""
_SYSTEM = ("/bin/", "/sbin/", "/lib", "/usr/", "/etc/")

Found = Callable[[str], None]
"""Told of the path of a verdict before it is looked into."""


class TamperedError(VerifierError):
    """What the verdict rests on was changed while the verifier ran; the verdict is void."""

    code = "tampered"


class RewardUnvouchedError(VerifierError):
    """The reward may be the agent's word: who wrote it had run its code, or is not known."""

    code = "reward_unvouched"


def from_report(
    report: GuardReport,
    result: ExecResult,
    tampering: Tampering,
    found: Found,
    *,
    workdir: str,
) -> tuple[str, bytes]:
    """Return path and bytes of the verdict in a guarded directory.

    Args:
        workdir: what lies there is the agent's work, wherever it is.
    Raises:
        RewardMissingError, RewardInvalidError: test.sh has written none, or no regular file.
        RewardUnvouchedError: only by processes that had run the agent's code, or nobody knows.
        GradingPreventedError: so it is, and the agent has put its code in the place of a program.
    """
    if report.lost:
        raise RewardUnvouchedError(
            f"{VERIFIER_LOGS}: more files were opened while test.sh ran than the node could judge, "
            "so that it vouches for none there"
        )
    undisturbed = report.alone and report.touched is None
    unvouched, blocked = [], []
    for file in sorted(report.files, key=lambda one: NAMES.index(one.name)):
        path = f"{VERIFIER_LOGS}/{file.name}"
        # Nobody is asked who makes a directory, a link or an empty file: it is test.sh's if nobody
        # else could.
        content = file.kind is FileKind.FILE and file.size > 0
        if file.vouched or (undisturbed and not content):
            found(path)
            # Where others lived, another name of it is no fault of test.sh's, and nobody's to
            # write.
            _require_own(path, file.kind, file.nlink if undisturbed else 1)
            return path, file.content
        if content:
            unvouched.append(path)
        elif file.kind is not FileKind.FILE:
            blocked.append(f"{path}: a {file.kind}")
    led = [one for one in report.refused if not one.outsider]
    if led or unvouched or blocked:
        tampering.void(REFUSED)
    raise _why_none(report, led, unvouched, blocked, workdir) or missing(result)


def _why_none(
    report: GuardReport,
    led: Sequence[GuardRefusal],
    unvouched: Sequence[str],
    blocked: Sequence[str],
    workdir: str,
) -> ColdframeError | None:
    """Return why no file counts although something was written; None: nothing was."""
    if led and not report.displaced:
        return _prevented(led[0], workdir)
    if report.displaced and not (report.alone and report.touched is None):
        return GradingPreventedError(
            f"{VERIFIER_LOGS}/{report.displaced[0]}: test.sh wrote it, and something of the "
            "agent's has taken it away"
        )
    if blocked and not unvouched:
        return GradingPreventedError(
            f"{blocked[0]}, which something of the agent's has put in the reward's place"
        )
    if unvouched:
        return RewardUnvouchedError(
            f"{unvouched[0]}: written, or moved there, by a process that had run the agent's code; "
            "let test.sh itself write it"
        )
    return None


def _prevented(refusal: GuardRefusal, workdir: str) -> ColdframeError:
    path, cause = f"{VERIFIER_LOGS}/{refusal.name}", refusal.cause
    said = f"{path}: {excerpt(refusal.program)} was to write it and had run {excerpt(cause)}"
    if cause.startswith(_SYSTEM) and not is_in(cause, (workdir,)):
        return GradingPreventedError(f"{said}, which the agent has put in the system's place")
    return RewardUnvouchedError(
        f"{said}, which is the agent's; let test.sh write it by a process that runs none of the "
        "agent's code, or name that path in [metadata.coldframe] agent_paths"
    )


def tell_refused(report: GuardReport, tampering: Tampering) -> None:
    """Note once per program, file and cause who was refused."""
    told = {}
    for one in report.refused:
        why = "test.sh did not start it" if one.outsider else f"it had run {excerpt(one.cause)}"
        told[one.name, one.program, why] = one
    for name, program, why in list(told)[:LISTED]:
        tampering.found(
            REFUSED,
            f"{VERIFIER_LOGS}/{name}",
            "for test.sh alone to write",
            f"{excerpt(program)} was refused: {why}",
            voided=False,
        )


def _require_own(path: str, kind: FileKind, nlink: int) -> None:
    if kind is not FileKind.FILE:
        raise RewardInvalidError(f"{path}: a {kind}, not a regular file")
    if nlink != 1:
        raise RewardInvalidError(f"{path}: has {nlink} names, so others may write it")


def missing(result: ExecResult) -> RewardMissingError:
    """Say that test.sh has written no verdict, and how it ended."""
    code = f"exit code {result.exit_code}" if result.signal is None else f"signal {result.signal}"
    return RewardMissingError(
        f"test.sh ended ({result.reason}, {code}) and wrote neither reward.json nor reward.txt "
        f"in {VERIFIER_LOGS}"
    )


async def from_files(
    sandbox: AsyncSandbox, result: ExecResult, tampering: Tampering, found: Found
) -> tuple[str, bytes]:
    """Return path and bytes of the verdict where nothing can be guarded.

    Raises:
        RewardMissingError, RewardInvalidError: test.sh has written none, or no regular file.
        TamperedError: it was written after test.sh had ended.
    """
    for path in (LOGS, VERIFIER_LOGS):
        kind = await kind_of(sandbox, path)
        if kind not in {None, FileKind.DIRECTORY}:
            raise RewardInvalidError(f"{path}: a {kind}, not a directory")
    for path in (f"{VERIFIER_LOGS}/{name}" for name in NAMES):
        try:
            stat = await sandbox.files.stat(path, follow=False)
        except PathNotFoundError:
            continue
        found(path)
        _require_own(path, stat.kind, stat.nlink)
        _require_in_time(path, stat.ctime_ns, result, tampering)
        try:
            return path, await sandbox.files.read(path, length=MAX_REWARD_BYTES + 1)
        except FileError as error:
            raise RewardInvalidError(f"{path}: cannot be read: {error}") from error
    raise missing(result)


def _require_in_time(path: str, changed_ns: int, result: ExecResult, tampering: Tampering) -> None:
    """Refuse a reward that was touched after test.sh ended: it is somebody else's."""
    ended_ns = int(result.ended_at * 1e9)
    if changed_ns > ended_ns + LATE_NS:
        late = f"{(changed_ns - ended_ns) / 1e6:.1f} ms after test.sh ended"
        tampering.found("reward_late", path, "written by test.sh", late, voided=True)
        raise TamperedError(f"{path}: written {late}, by another")
