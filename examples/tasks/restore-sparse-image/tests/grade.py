"""Grade the restored images: content and allocated blocks, of backups that are made here."""

import json
import os
import pathlib
import random
import resource
import shutil
import struct
import subprocess
import tempfile

PROGRAM = "/srv/restore/restore.py"
NOBODY = 65534


def encode(block, size, entries):
    body = b"".join(
        struct.pack("<QB", number, data is not None) + (data or b"") for number, data in entries
    )
    return b"CFBACKUP" + struct.pack("<IQI", block, size, len(entries)) + body


def decode(data):
    block, size, count = struct.unpack_from("<IQI", data, 8)
    offset, entries = 24, []
    for _ in range(count):
        number, kind = struct.unpack_from("<QB", data, offset)
        offset += 9
        entries.append((number, data[offset : offset + block] if kind else None))
        offset += block if kind else 0
    return block, size, entries


def replay(backups):
    """Return (block size, size, {block: bytes that are not all zero, cut at the image's end})."""
    image, block, size = {}, 0, 0
    for block, size, entries in backups:
        for number in list(image):
            image[number] = image[number][: max(0, size - number * block)]
            if len(image[number]) == 0:
                del image[number]
        for number, data in entries:
            image.pop(number, None)
            if data is not None:
                image[number] = data[: size - number * block]
    return block, size, {n: d for n, d in image.items() if d.count(0) != len(d)}


def compare(path, backups):
    block, size, image = replay(backups)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        return f"{path}: {error.strerror}"
    try:
        return compare_open(fd, block, size, image)
    finally:
        os.close(fd)


def compare_open(fd, block, size, image):
    os.fsync(fd)  # some file systems know what they allocated only then
    info = os.fstat(fd)
    if info.st_size != size:
        return f"size {info.st_size} instead of {size}"
    limit = len(image) * block
    limit += (64 << 10) + limit // 50
    if info.st_blocks * 512 > limit:
        return f"{info.st_blocks * 512} bytes are allocated, more than {limit}"
    for number, right in image.items():
        found = os.pread(fd, len(right), number * block)
        rest = os.pread(fd, block - len(right), number * block + len(right))
        if found != right or rest.strip(b"\0"):
            return f"block {number} differs"
    return stray_data(fd, block, size, image)


def stray_data(fd, block, size, image):
    """Look at everything that is no hole and no block of the image: it must be zeros."""
    offset = 0
    while offset < size:
        try:
            start = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole follows
            return None
        offset = os.lseek(fd, start, os.SEEK_HOLE)
        for number in range(start // block, -(-offset // block)):
            if number not in image and os.pread(fd, block, number * block).strip(b"\0"):
                return f"block {number} should be zeros"
    return None


def make_history(rng):
    """Return backups in which images shrink, grow, and change their minds."""
    block = rng.choice([4096, 4096, 16384, 65536, 1 << 20])
    limit = rng.choice([40 * block, 3 << 30, 1 << 40])
    backups = []
    spots = [rng.randrange(max(1, limit // block)) for _ in range(24)] + list(range(6))
    for _ in range(rng.randint(1, 6)):
        size = max(1, rng.choice([limit, limit // 2, limit // 3, rng.choice(spots) * block]) - rng.choice([0, 1, 100, block - 1]))
        end = -(-size // block)
        numbers = {n for n in spots if n < end} | {end - 1}
        entries = []
        for number in rng.sample(sorted(numbers), rng.randint(0, len(numbers))):
            draw = rng.random()
            if draw < 0.25:
                data = None
            elif draw < 0.35:
                data = bytes(block)
            elif draw < 0.5:
                data = bytes(block - 1) + b"\1"
            else:
                data = rng.randbytes(block // 4) + bytes(block - block // 4)
            entries.append((number, data))
        backups.append((block, size, entries))
    return backups


def limits():
    resource.setrlimit(resource.RLIMIT_AS, (256 << 20, 256 << 20))


def run(out, paths):
    return subprocess.run(
        ["python3", PROGRAM, out, *paths], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/",
        timeout=60, capture_output=True, preexec_fn=limits, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip


def restored(directory, backups, encoded=None, older=None):
    """Write the backups, run the program; return (how it ended, the path of OUT)."""
    paths = []
    for i, one in enumerate(encoded or [encode(*backup) for backup in backups]):
        paths.append(os.path.join(directory, f"{i}.bak"))
        pathlib.Path(paths[-1]).write_bytes(one)
    place = os.path.join(directory, "place")
    shutil.rmtree(place, ignore_errors=True)
    os.mkdir(place)
    os.chown(place, NOBODY, NOBODY)
    out = os.path.join(place, "out.img")
    if older is not None:
        pathlib.Path(out).write_bytes(older)
        os.chown(out, NOBODY, NOBODY)
    return run(out, paths), out


def check_histories(directory):
    rng = random.Random("restore-sparse-image/1")
    for i in range(30):
        backups = make_history(rng)
        older = rng.randbytes(300_000) if rng.random() < 0.4 else None
        ended, out = restored(directory, backups, older=older)
        if ended.returncode != 0:
            return f"history {i}: exit {ended.returncode}: {ended.stderr[-300:]!r}"
        problem = compare(out, backups)
        if problem:
            return f"history {i}: {problem}"
    return None


def check_refusals(directory):
    good = encode(4096, 8192, [(0, b"x" * 4096), (1, b"y" * 4096)])
    for name, data in {
        "a short head": good[:20], "a short block": good[:-1], "a missing entry": good[: 24 + 9 + 4096],
        "half an entry": good[: 24 + 9 + 4096 + 5], "another file": b"CFBACKUQ" + good[8:], "nothing": b"",
    }.items():  # fmt: skip
        for encoded in ([data], [good, data]):
            ended, out = restored(directory, [], encoded, older=b"older image")
            if ended.returncode != 2 or ended.stderr.strip().count(b"\n") or not ended.stderr.strip():
                return f"{name}: exit {ended.returncode}, stderr {ended.stderr[-200:]!r}"
            if pathlib.Path(out).read_bytes() != b"older image":
                return f"{name}: the older image was not left as it was"
    return None


def check():
    shipped = [decode(pathlib.Path(f"/srv/restore/backups/{i}.bak").read_bytes()) for i in range(3)]
    problem = compare("/srv/restore/disk.img", shipped)
    if problem:
        return f"disk.img: {problem}"
    directory = tempfile.mkdtemp(dir="/srv")
    os.chmod(directory, 0o755)
    try:
        return check_histories(directory) or check_refusals(directory)
    except subprocess.TimeoutExpired:
        return "a restore does not come to an end"
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    problem = check()
    print(problem or "all as it should be")
    pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": 0.0 if problem else 1.0}))
