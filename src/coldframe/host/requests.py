"""What a spawner worker is asked, as the fields of frames. Pure values."""

from __future__ import annotations

from coldframe.host import wire
from coldframe.host.spawner_types import Argument, CreateSpec, ExecSpec, Keep
from coldframe.host.wire import Field, Tag


def to_bytes(value: Argument) -> bytes:
    """Return an argument as it is sent. Raises ValueError: it holds a NUL."""
    encoded = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    if b"\0" in encoded:
        raise ValueError(f"{encoded[:80]!r} holds a NUL")
    return encoded


def create_fields(spec: CreateSpec, descriptors: list[int]) -> list[Field]:
    """Return the fields of CREATE, and add its descriptors to the list."""
    flags = wire.CreateFlag.NO_NEW_PRIVS if spec.no_new_privs else 0
    fields: list[Field] = [
        (Tag.SANDBOX, spec.sandbox_id.encode()),
        (Tag.HOSTNAME, to_bytes(spec.hostname)),
        (
            Tag.CREATE_NUMBERS,
            wire.CREATE_NUMBERS.pack(
                spec.id_base,
                spec.memory_bytes,
                spec.cpu_milli,
                spec.pids,
                spec.shm_bytes,
                spec.tmpfs_bytes,
                flags,
            ),
        ),
    ]
    fields += [(Tag.LAYER, to_bytes(name)) for name in spec.layers]
    if spec.upper is not None:
        fields.append((Tag.UPPER_FD, wire.U32.pack(len(descriptors))))
        descriptors.append(spec.upper)
    if spec.inject is not None:
        fields.append((Tag.INJECT, spec.inject.encode()))
    return fields + keep_fields(spec.keep, descriptors) + lease_fields(spec.keep)


def exec_fields(spec: ExecSpec, exec_id: int, descriptors: list[int]) -> list[Field]:
    """Return the fields of EXEC, and add its descriptors to the list."""
    flags = (
        (wire.ExecFlag.MERGE_STDERR if spec.merge_stderr else 0)
        | (wire.ExecFlag.STARTED if spec.want_started else 0)
        | (wire.ExecFlag.PTY if spec.pty else 0)
        | (wire.ExecFlag.OUT_OF_REACH if spec.out_of_reach else 0)
    )
    rows, cols = spec.pty or (0, 0)
    numbers = wire.EXEC_NUMBERS.pack(
        exec_id,
        spec.uid,
        spec.gid,
        spec.umask,
        0 if spec.deadline_s is None else max(1, int(spec.deadline_s * 1e9)),
        spec.spool_bytes,
        spec.inline_bytes,
        spec.kill_bytes or 0,
        rows,
        cols,
        flags,
    )
    fields: list[Field] = [
        (Tag.SANDBOX, spec.sandbox_id.encode()),
        (Tag.EXEC_NUMBERS, numbers),
        (Tag.CWD, to_bytes(spec.cwd)),
    ]
    fields += [(Tag.ARG, to_bytes(value)) for value in spec.argv]
    fields += [(Tag.ENV, to_bytes(entry)) for entry in spec.env]
    fields += [(Tag.GROUP, wire.U64.pack(group)) for group in spec.groups]
    if spec.stdin is not None:
        fields.append((Tag.STDIN_FD, wire.U32.pack(len(descriptors))))
        descriptors.append(spec.stdin)
    if spec.status is not None:
        fields.append((Tag.STATUS_FD, wire.U32.pack(len(descriptors))))
        descriptors.append(spec.status)
    return fields + keep_fields(spec.keep, descriptors)


def keep_fields(keep: Keep | None, descriptors: list[int]) -> list[Field]:
    """Return what is to be kept, and add its descriptors to those of the frame."""
    if keep is None:
        return []
    fields: list[Field] = [] if keep.note is None else [(Tag.NOTE, keep.note)]
    if keep.descriptors is not None and not keep.descriptors:
        fields.append((Tag.KEEP_FD, b""))
    for fd in keep.descriptors or ():
        fields.append((Tag.KEEP_FD, wire.U32.pack(len(descriptors))))
        descriptors.append(fd)
    return fields


def lease_fields(keep: Keep | None) -> list[Field]:
    """Return until when a sandbox or command may live without a daemon."""
    if keep is None:
        return []
    expires_ns = 0 if keep.expires_at is None else max(1, int(keep.expires_at * 1e9))
    return [(Tag.EXPIRES, wire.U64.pack(expires_ns))]
