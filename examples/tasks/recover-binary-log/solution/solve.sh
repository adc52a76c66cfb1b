#!/bin/sh
set -eu
cat > /srv/store/recover.py <<'PY'
"""Recover a key-value log: print its committed state and what was wrong with it."""

import json
import struct
import sys
import zlib

MAGIC = b"CFLG0001"
HEADER = struct.Struct("<IIQB")
PUT, DELETE, COMMIT = 1, 2, 3


def record_at(data, offset):
    """Return (sequence, type, payload, end) of the whole record at an offset, or None."""
    if offset + HEADER.size > len(data):
        return None
    length, crc, sequence, kind = HEADER.unpack_from(data, offset)
    end = offset + HEADER.size + length
    if length > 65536 or end > len(data) or not PUT <= kind <= COMMIT:
        return None
    if zlib.crc32(data[offset + 8 : end]) != crc:
        return None
    payload = bytes(data[offset + HEADER.size : end])
    if kind == COMMIT and payload:
        return None
    if kind == PUT and (length < 2 or 2 + struct.unpack_from("<H", payload)[0] > length):
        return None
    return sequence, kind, payload, end


def apply(entries, records):
    for _, kind, payload in records:
        if kind == PUT:
            split = 2 + struct.unpack_from("<H", payload)[0]
            entries[payload[2:split].hex()] = payload[split:].hex()
        elif kind == DELETE:
            entries.pop(payload.hex(), None)


def recover(data):
    entries, pending = {}, []
    greatest = last_commit = dropped = duplicates = damaged = 0
    seen_any = False
    offset = len(MAGIC)
    while offset < len(data):
        record = record_at(data, offset)
        if record is None:
            damaged += 1
            offset += 1
            continue
        sequence, kind, payload, offset = record
        if seen_any and sequence <= greatest:
            duplicates += 1
            continue
        seen_any, greatest = True, sequence
        pending.append((sequence, kind, payload))
        if kind != COMMIT:
            continue
        numbers = [one[0] for one in pending]
        if numbers == list(range(last_commit + 1, last_commit + 1 + len(numbers))):
            apply(entries, pending)
        else:
            dropped += 1
        last_commit, pending = sequence, []
    return {
        "entries": entries,
        "last_commit": last_commit,
        "dropped": dropped,
        "duplicates": duplicates,
        "damaged_bytes": damaged,
    }


with open(sys.argv[1], "rb") as file:
    data = memoryview(file.read())
if data[: len(MAGIC)] != MAGIC:
    print(f"{sys.argv[1]}: not a log", file=sys.stderr)
    sys.exit(2)
json.dump(recover(data), sys.stdout)
PY
python3 recover.py sample.log > /tmp/sample.out
python3 -c 'import json; assert json.load(open("/tmp/sample.out")) == json.load(open("sample.json"))'
rm /tmp/sample.out
