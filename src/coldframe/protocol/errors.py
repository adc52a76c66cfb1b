"""Every failure Coldframe reports, each with a stable code and the side it belongs to.

A failed command is a result; a failed platform is an exception. Only failures of the
policy's side may ever become a reward.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class Side(StrEnum):
    """Whose failure it is."""

    POLICY = "policy"
    STARTUP = "startup"
    ENVIRONMENT = "environment"
    OBSERVATION = "observation"
    INFERENCE = "inference"
    VERIFIER = "verifier"
    HARNESS = "harness"
    CALLER = "caller"


class Execution(StrEnum):
    """What is known of an operation that failed."""

    NOT_EXECUTED = "not_executed"
    EXECUTED = "executed"
    UNKNOWN = "perhaps_executed"


class ColdframeError(Exception):
    """Root of everything Coldframe raises on purpose."""

    code: ClassVar[str] = "internal"
    side: ClassVar[Side] = Side.ENVIRONMENT
    retryable: ClassVar[bool] = False
    execution: Execution = Execution.NOT_EXECUTED

    def __init__(self, message: str, *, execution: Execution | None = None) -> None:
        super().__init__(message)
        if execution is not None:
            self.execution = execution


# --- the caller's own -----------------------------------------------------------------


class InvalidRequestError(ColdframeError):
    """A value is out of range or two values contradict; the message names it."""

    code = "invalid_request"
    side = Side.CALLER


class SandboxNotFoundError(ColdframeError):
    """No sandbox of that id or name is known to this node."""

    code = "sandbox_not_found"
    side = Side.CALLER


class CursorExpiredError(ColdframeError):
    """What followed a cursor is kept no longer in whole; `oldest` is where one can go on."""

    code = "cursor_expired"
    side = Side.CALLER

    def __init__(
        self, message: str, *, execution: Execution | None = None, oldest: str | None = None
    ) -> None:
        super().__init__(message, execution=execution)
        self.oldest = oldest


class NameInUseError(ColdframeError):
    """A live sandbox has this name already."""

    code = "name_in_use"
    side = Side.CALLER


class ConflictError(ColdframeError):
    """The sandbox has moved on since the version that the operation expects."""

    code = "conflict"
    side = Side.CALLER


class OperationMismatchError(ColdframeError):
    """The operation id was used before for a different request."""

    code = "operation_mismatch"
    side = Side.CALLER


class OperationExpiredError(ColdframeError):
    """The operation id is older than results are kept; it is never run again."""

    code = "operation_expired"
    side = Side.CALLER


class OperationNotFoundError(ColdframeError):
    """No operation of that id is known."""

    code = "operation_not_found"
    side = Side.CALLER


class ClientClosedError(ColdframeError):
    """The client was closed, or never opened."""

    code = "client_closed"
    side = Side.CALLER


class NotAuthenticatedError(ColdframeError):
    """The service takes no request without a valid key; the message says what was wrong."""

    code = "not_authenticated"
    side = Side.CALLER


class NotPermittedError(ColdframeError):
    """The key is valid but lacks the scope that the request needs."""

    code = "not_permitted"
    side = Side.CALLER


class TooLargeError(ColdframeError):
    """The request's body is larger than the service takes; stream files instead."""

    code = "too_large"
    side = Side.CALLER


class TooSlowError(ColdframeError):
    """The request's body did not come to its end in the time that it had; nothing was done."""

    code = "too_slow"
    side = Side.CALLER
    retryable = True


class VersionMismatchError(ColdframeError):
    """Client and service speak no common version of the protocol; nothing was done."""

    code = "version_mismatch"
    side = Side.CALLER


# --- images ---------------------------------------------------------------------------


class ImageError(ColdframeError):
    """An image could not be read, built or imported."""

    code = "image_error"
    side = Side.CALLER


class ImageNotFoundError(ImageError):
    """No image of that name is in the store; the message says how to get one."""

    code = "image_not_found"


class ImageDamagedError(ImageError):
    """What the store has kept of an image is damaged; the message names the file and remedy."""

    code = "image_damaged"
    side = Side.ENVIRONMENT


class DockerfileError(ImageError):
    """A Dockerfile line is refused; the message begins with file:line."""

    code = "dockerfile_error"


class BuildStepError(DockerfileError):
    """A RUN ran and failed, or could not be started; the message begins with file:line."""

    code = "build_step_failed"
    side = Side.STARTUP


# --- sandboxes ------------------------------------------------------------------------


class SandboxStateError(ColdframeError):
    """The sandbox is in a state that does not take this operation."""

    code = "sandbox_state"
    side = Side.CALLER


class SandboxGoneError(ColdframeError):
    """The sandbox was deleted, expired or died before or during the operation."""

    code = "sandbox_gone"
    side = Side.ENVIRONMENT


class CreateError(ColdframeError):
    """The sandbox could not be made; nothing of it is left."""

    code = "create_failed"
    side = Side.STARTUP
    retryable = True


class CapabilityError(ColdframeError):
    """This machine or runtime cannot do what was asked; the message names the remedy."""

    code = "capability_missing"
    side = Side.STARTUP


class CapacityError(ColdframeError):
    """The node's queue is full or a resource ran out; try again later."""

    code = "capacity"
    side = Side.STARTUP
    retryable = True


class QuotaError(CapacityError):
    """The owner's quota is used up; delete sandboxes, or try again when some have ended."""

    code = "quota_exceeded"
    side = Side.CALLER


class UnsatisfiableError(ColdframeError):
    """It is more than the owner's quota ever allows; asking again changes nothing."""

    code = "unsatisfiable"
    side = Side.CALLER


class ServiceUnreachableError(ColdframeError):
    """The service did not answer; `execution` says whether it may have done what was asked."""

    code = "service_unreachable"
    side = Side.ENVIRONMENT
    retryable = True


class StoreUnreachableError(ColdframeError):
    """No key can be checked: the service's store does not answer. What runs goes on."""

    code = "store_unreachable"
    side = Side.ENVIRONMENT
    retryable = True


class StorageFullError(ColdframeError):
    """No space is left for uppers, spools or images; nothing was lost."""

    code = "storage_full"
    side = Side.ENVIRONMENT
    retryable = True


class SpawnerLostError(ColdframeError):
    """The spawner died; its sandboxes are lost. Whether the operation ran is unknown."""

    code = "spawner_lost"
    side = Side.ENVIRONMENT
    retryable = True
    execution = Execution.UNKNOWN


# --- exec -----------------------------------------------------------------------------


class NotExecutedError(ColdframeError):
    """The command was never started; nothing ran."""

    code = "not_executed"
    side = Side.POLICY


class ProgramNotFoundError(NotExecutedError):
    """No such program in the sandbox, or not on its PATH."""

    code = "program_not_found"


class ProgramNotExecutableError(NotExecutedError):
    """The program is there but cannot be executed (mode, format, missing loader)."""

    code = "program_not_executable"


class ShellNotFoundError(NotExecutedError):
    """The image has no such shell; pass argv instead of a command line."""

    code = "shell_not_found"


class WorkdirNotFoundError(NotExecutedError):
    """The working directory does not exist or cannot be entered."""

    code = "workdir_not_found"


class UserNotFoundError(NotExecutedError):
    """No such user in the image's /etc/passwd."""

    code = "user_not_found"


class ArgumentsTooLongError(NotExecutedError):
    """Arguments and environment together are longer than the kernel takes."""

    code = "arguments_too_long"


class StdinClosedError(ColdframeError, BrokenPipeError):
    """Nobody reads the command's stdin."""

    code = "broken_pipe"
    side = Side.POLICY
    execution = Execution.UNKNOWN


class OutputNotKeptError(ColdframeError):
    """The command's output at that place is kept no longer; its result has the head and tail."""

    code = "output_not_kept"
    side = Side.OBSERVATION
    execution = Execution.EXECUTED


# --- files ----------------------------------------------------------------------------


class FileError(ColdframeError):
    """A file operation was refused or failed; the message names the path."""

    code = "file_error"
    side = Side.POLICY


class PathNotFoundError(FileError):
    """No such path in the sandbox."""

    code = "path_not_found"


class PathRefusedError(FileError):
    """The path leads where the file API does not go: a device, FIFO, socket, pseudo file system."""

    code = "path_refused"


class PathExistsError(FileError):
    """The path exists, or is not empty, or has another kind than is needed."""

    code = "path_exists"


class FileTooLargeError(FileError):
    """The content is larger than the stated maximum; stream it instead."""

    code = "file_too_large"


class NotKnownError(FileError):
    """The state of the sandbox's files could not be told within the bounds of time and size."""

    code = "not_known"


class PatchError(FileError):
    """The patch does not apply; no file was changed."""

    code = "patch_rejected"


class StaleBaseError(PatchError):
    """A file is not what the patch was made against; no file was changed."""

    code = "stale_base"


class PortUnreachableError(ColdframeError):
    """Nothing in the sandbox accepts connections on that port."""

    code = "port_unreachable"
    side = Side.POLICY


class PortUrlInvalidError(ColdframeError):
    """The URL of a port is unknown or expired, or its sandbox has ended."""

    code = "port_url_invalid"
    side = Side.CALLER


# --- sessions -------------------------------------------------------------------------


class SessionEndedError(ColdframeError):
    """The session's shell has ended; its state is gone."""

    code = "session_ended"
    side = Side.POLICY


# --- tasks, rollouts ------------------------------------------------------------------


class TaskError(ColdframeError):
    """A task directory is not valid or uses a field that is not honoured; named."""

    code = "task_refused"
    side = Side.CALLER


class RunError(ColdframeError):
    """A run directory cannot be used as asked."""

    code = "run_refused"
    side = Side.CALLER


class VerifierError(ColdframeError):
    """The verifier did not give a verdict. Never a reward of 0."""

    code = "verifier_failed"
    side = Side.VERIFIER


class RewardMissingError(VerifierError):
    """The verifier ended without a reward file."""

    code = "reward_missing"
    execution = Execution.EXECUTED


class RewardInvalidError(VerifierError):
    """The reward file does not hold a finite number or a flat map of them."""

    code = "reward_invalid"
    execution = Execution.EXECUTED


class VerifierDeadlineError(VerifierError):
    """The verifier outlived its deadline."""

    code = "verifier_deadline"
    execution = Execution.EXECUTED


class GradingPreventedError(ColdframeError):
    """There is no verdict, and what the agent left is the cause; the message names it."""

    code = "grading_prevented"
    side = Side.POLICY


class HarnessError(ColdframeError):
    """The harness itself failed."""

    code = "harness_failed"
    side = Side.HARNESS


class InferenceError(ColdframeError):
    """The model endpoint failed or answered nonsense."""

    code = "inference_failed"
    side = Side.INFERENCE
    retryable = True
