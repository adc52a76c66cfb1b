#!/bin/sh
# Takes a zero entry for nothing to do: older data stays.
set -eu
cat > /srv/restore/restore.py <<'PY'
"""Restore a sparse image: work out where each block's last word lies, then write only those."""

import os
import struct
import sys

HEAD = struct.Struct("<8sIQI")
ENTRY = struct.Struct("<QB")


class Refused(Exception):
    """A file that is no backup, or only the beginning of one."""


def read(file, length):
    data = file.read(length)
    if len(data) != length:
        raise Refused(f"{file.name}: ends too early")
    return data


def add(blocks, path, file):
    """Bring {block: (path, offset)} up to one backup; return (size, block size)."""
    magic, block, size, count = HEAD.unpack(read(file, HEAD.size))
    if magic != b"CFBACKUP":
        raise Refused(f"{path}: not a backup")
    end = -(-size // block)
    for number in [one for one in blocks if one >= end]:
        del blocks[number]
    if size % block and end - 1 in blocks:
        origin, offset, valid = blocks[end - 1]
        blocks[end - 1] = (origin, offset, min(valid, size % block))
    available = os.fstat(file.fileno()).st_size
    for _ in range(count):
        number, kind = ENTRY.unpack(read(file, ENTRY.size))
        if kind == 0:
            continue
        valid = min(block, size - number * block)
        blocks[number] = (path, file.tell(), valid)
        if file.seek(block, 1) > available:
            raise Refused(f"{path}: ends too early")
    return size, block


def restore(out, backups):
    blocks, size, block = {}, 0, 0
    for path in backups:
        with open(path, "rb") as file:
            size, block = add(blocks, path, file)
    temporary = out + ".new"
    files = {path: open(path, "rb") for path in backups}
    with open(temporary, "wb") as target:
        target.truncate(size)
        for number, (path, offset, valid) in sorted(blocks.items()):
            data = os.pread(files[path].fileno(), valid, offset)
            if data.strip(b"\0"):
                target.seek(number * block)
                target.write(data)
    os.rename(temporary, out)


try:
    restore(sys.argv[1], sys.argv[2:])
except Refused as problem:
    print(problem, file=sys.stderr)
    sys.exit(2)
PY
python3 restore.py disk.img backups/0.bak backups/1.bak backups/2.bak
