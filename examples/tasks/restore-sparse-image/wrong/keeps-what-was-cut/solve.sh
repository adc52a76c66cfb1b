#!/bin/sh
# Forgets that a shorter image cut data off: a later, longer one brings it back.
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
    available = os.fstat(file.fileno()).st_size
    for _ in range(count):
        number, kind = ENTRY.unpack(read(file, ENTRY.size))
        if kind == 0:
            blocks.pop(number, None)
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
            valid = min(valid, size - number * block)
            data = os.pread(files[path].fileno(), valid, offset) if valid > 0 else b""
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
