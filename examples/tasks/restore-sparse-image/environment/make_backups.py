"""Make the three backups that the task ships."""

import pathlib
import random
import struct
import sys

BLOCK = 16384
rng = random.Random("restore-sparse-image/shipped")


def backup(size, entries):
    body = b"".join(
        struct.pack("<QB", number, data is not None) + (data or b"") for number, data in entries
    )
    return b"CFBACKUP" + struct.pack("<IQI", BLOCK, size, len(entries)) + body


def data():
    return rng.randbytes(BLOCK)


target = pathlib.Path(sys.argv[1])
large = 8 << 30
entries = [(n, data()) for n in rng.sample(range(large // BLOCK), 40)]
entries += [(n, bytes(BLOCK)) for n in (5, 6)]
(target / "0.bak").write_bytes(backup(large, entries))
kept = [n for n, _ in entries if n < (2 << 30) // BLOCK]
(target / "1.bak").write_bytes(backup(2 << 30, [(kept[0], None), (kept[1], data())]))
(target / "2.bak").write_bytes(backup((6 << 30) + 1234, [((6 << 30) // BLOCK, data()), (1, data())]))
