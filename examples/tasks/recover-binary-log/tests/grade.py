"""Grade recover.py on logs that are made here, against a model that knows what it wrote."""

import json
import os
import pathlib
import random
import resource
import struct
import subprocess
import tempfile
import zlib

PROGRAM = "/srv/store/recover.py"
MAGIC = b"CFLG0001"
PUT, DELETE, COMMIT = 1, 2, 3
NOBODY = 65534


def record(sequence, kind, payload=b""):
    body = struct.pack("<QB", sequence, kind) + payload
    return struct.pack("<II", len(payload), zlib.crc32(body)) + body


def put(key, value):
    return struct.pack("<H", len(key)) + key + value


def whole_at(data, offset):
    """The definition in the instruction, once more and apart from any solution."""
    head = data[offset : offset + 8]
    if len(head) < 8:
        return None
    length, crc = struct.unpack("<II", head)
    body = data[offset + 8 : offset + 17 + length] if length <= 65536 else b""
    if length > 65536 or len(body) != 9 + length or zlib.crc32(body) != crc:
        return None
    sequence, kind = struct.unpack("<QB", body[:9])
    payload = body[9:]
    fits = {
        PUT: length >= 2 and int.from_bytes(payload[:2], "little") + 2 <= length,
        DELETE: True,
        COMMIT: length == 0,
    }
    return (sequence, kind, payload) if fits.get(kind, False) else None


def expected(data):
    found, damaged, offset = [], 0, 8
    while offset < len(data):
        one = whole_at(data, offset)
        if one:
            found.append(one)
            offset += 17 + len(one[2])
        else:
            damaged, offset = damaged + 1, offset + 1
    fresh, top = [], -1
    for one in found:
        if one[0] > top:
            fresh.append(one)
            top = one[0]
    entries, batch, previous, dropped = {}, [], 0, 0
    for one in fresh:
        batch.append(one)
        if one[1] != COMMIT:
            continue
        if all(item[0] == previous + 1 + i for i, item in enumerate(batch)):
            for _, kind, payload in batch:
                if kind == PUT:
                    end = 2 + int.from_bytes(payload[:2], "little")
                    entries[payload[2:end].hex()] = payload[end:].hex()
                elif kind == DELETE:
                    entries.pop(payload.hex(), None)
        else:
            dropped += 1
        batch, previous = [], one[0]
    return {
        "entries": entries,
        "last_commit": previous,
        "dropped": dropped,
        "duplicates": len(found) - len(fresh),
        "damaged_bytes": damaged,
    }


def make_records(rng, transactions, value_bytes=40):
    """Return encoded records; some values hold whole records of old and of future sequences."""
    keys = [rng.randbytes(rng.randint(0, 6)) for _ in range(12)]
    records, sequence = [], 0
    for _ in range(transactions):
        for _ in range(rng.randint(0, 5)):
            sequence += 1
            key = rng.choice(keys)
            if rng.random() < 0.25:
                records.append(record(sequence, DELETE, key))
                continue
            value = rng.randbytes(rng.randint(0, value_bytes))
            if rng.random() < 0.15:
                ghost = rng.choice([1, sequence, sequence + rng.randint(1, 9)])
                value += record(ghost, rng.choice([PUT, COMMIT]), b"") + value[:3]
            if rng.random() < 0.1:
                value += record(sequence + 1, PUT, put(key, b"ghost"))
            records.append(record(sequence, PUT, put(key, value)))
        sequence += 1
        records.append(record(sequence, COMMIT))
    return records


def damage(rng, records):
    """Return a log's bytes with the faults of a crash in them."""
    out = []
    for i, one in enumerate(records):
        draw = rng.random()
        if draw < 0.03:
            at = rng.randrange(len(one))
            one = one[:at] + bytes([one[at] ^ (1 << rng.randrange(8))]) + one[at + 1 :]
        elif draw < 0.05:
            one = b""
        elif draw < 0.07:
            one = one[: rng.randrange(len(one))]
        elif draw < 0.08:
            one = struct.pack("<I", rng.choice([0, 65536, 65537, 0xFFFFFFFF])) + one[4:]
        elif draw < 0.09:
            one = rng.randbytes(rng.randint(1, 60)) + one
        elif draw < 0.10:
            one = bytes(rng.randint(1, 600)) + one
        out.append(one)
        if rng.random() < 0.05:
            out.append(records[rng.randint(max(0, i - 4), i)])
    return MAGIC + b"".join(out)


def make_logs():
    rng = random.Random("recover-binary-log/1")
    yield "an empty log", MAGIC
    yield "only zeros behind the head", MAGIC + bytes(5000)
    yield "sequences from 0", MAGIC + record(0, PUT, put(b"a", b"b")) + record(1, COMMIT)
    yield "a first sequence of 2", MAGIC + record(2, PUT, put(b"a", b"b")) + record(3, COMMIT)
    yield "an empty transaction", MAGIC + record(1, COMMIT) + record(1, COMMIT) + record(2, COMMIT)
    top = 2**64 - 1
    yield "the greatest sequence", MAGIC + record(1, COMMIT) + record(top, COMMIT) + record(2, COMMIT)
    odd = [record(1, 4, b"x"), record(1, COMMIT, b"x"), record(1, PUT, b"\x09"), record(1, PUT, b"\x02\0a")]
    yield "right crc, wrong form", MAGIC + b"".join(odd) + record(1, PUT, put(b"a", b"")) + record(2, COMMIT)
    large = record(1, PUT, put(b"k", b"v" * 65533))
    yield "the greatest payload", MAGIC + large + record(2, COMMIT)
    whole = MAGIC + b"".join(make_records(rng, 6))
    for cut in sorted(rng.sample(range(8, len(whole)), 25)):
        yield f"torn at {cut}", whole[:cut]
    for i in range(60):
        yield f"damaged {i}", damage(rng, make_records(rng, rng.randint(1, 40)))
    yield "a large one", damage(rng, make_records(rng, 900, value_bytes=8000))


def limits():
    resource.setrlimit(resource.RLIMIT_AS, (256 << 20, 256 << 20))


def run(path):
    return subprocess.run(
        ["python3", PROGRAM, path], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/",
        capture_output=True, timeout=30, preexec_fn=limits, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip


def answer(path):
    """Return what the program says of a log, or why that is not an answer."""
    try:
        ended = run(path)
    except subprocess.TimeoutExpired:
        return "no end within 30 s"
    if ended.returncode != 0:
        return f"exit {ended.returncode}: {ended.stderr[-300:]!r}"
    try:
        return json.loads(ended.stdout)
    except ValueError:
        return f"not JSON: {ended.stdout[:200]!r}"


def check(directory):
    if not os.path.isfile(PROGRAM):
        return f"{PROGRAM} is not there"
    path = os.path.join(directory, "one.log")
    for name, data in make_logs():
        pathlib.Path(path).write_bytes(data)
        said, right = answer(path), expected(data)
        if said != right:
            wrong = [k for k in right if not isinstance(said, dict) or said.get(k) != right[k]]
            return f"{name}: {said if isinstance(said, str) else wrong or 'further fields'}"
    for data in (b"", b"CFLG000", b"CFLG0002" + record(1, COMMIT), b"\x7fELF" + bytes(100)):
        pathlib.Path(path).write_bytes(data)
        ended = run(path)
        if ended.returncode != 2 or ended.stdout or ended.stderr.strip().count(b"\n") or not ended.stderr.strip():
            return f"not a log ({data[:8]!r}): exit {ended.returncode}, {ended.stdout[:80]!r}"
    return None


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        problem = check(directory)
    print(problem or "all as it should be")
    pathlib.Path("/logs/verifier/reward.txt").write_text("0\n" if problem else "1\n")
