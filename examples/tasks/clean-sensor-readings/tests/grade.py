"""Grade the program on the given files and on made ones, against a second implementation."""

import decimal
import json
import os
import pathlib
import random
import shutil
import subprocess
import tempfile
from datetime import datetime, timedelta

PROGRAM = "/srv/sensors/clean"
INBOX = "/srv/sensors/inbox"
OUT = "/srv/sensors/readings.csv"
NOBODY = 65534
EPOCH = datetime(2024, 1, 1)
decimal.getcontext().prec = 60

GIVEN = (
    "station,time,celsius\n"
    "harbour,2024-05-01T06:00:00Z,11.70\n"
    "harbour,2024-05-01T07:00:00Z,12.00\n"
    '"hill, north",2024-05-01T06:30:00Z,8.00\n'
)
BAD_TIMES = ["2024-02-30T00:00:00Z", "2024-01-01 00:00:00Z", "2024-01-01T00:00:00", "2024-01-01T24:30:00Z", "yesterday", ""]
BAD_VALUES = ["", "1,5", "1e3", "NaN", "--4", "12.5 ", "+3", "0x10", "-273.16", "."]
STATIONS = ["harbour", "Harbour", "hill, north", 'the "old" mill', "Ærø", "ærø", " quay", "z"]


def rounded(value):
    """Two decimals, halves away from zero."""
    text = str(value.quantize(decimal.Decimal("0.01"), rounding=decimal.ROUND_HALF_UP))
    return "0.00" if text == "-0.00" else text


class Maker:
    """Makes an inbox and what is right for it."""

    def __init__(self, seed, place):
        self.rng, self.place = random.Random(seed), pathlib.Path(place)
        self.good, self.bad = {}, []

    def value(self):
        """Return (text, unit, right Celsius); many are exact halves of a hundredth."""
        unit = self.rng.choice("CCFK")
        thousandths = self.rng.randint(-40_000, 45_000)
        if self.rng.random() < 0.6:
            thousandths = thousandths // 10 * 10 + 5
        celsius = decimal.Decimal(thousandths) / 1000
        if unit == "F":
            text = str(celsius * 9 / 5 + 32)
        elif unit == "K":
            text = str(celsius + decimal.Decimal("273.15"))
        else:
            text = str(celsius)
        if "E" in text:
            text = format(decimal.Decimal(text), "f")
        return text, unit, celsius

    def time(self):
        """Return (text, right UTC)."""
        moment = EPOCH + timedelta(minutes=30 * self.rng.randint(0, 60))
        offset = self.rng.choice([None, 0, 60, 120, 330, -210, -60])
        right = moment.strftime("%Y-%m-%dT%H:%M:%SZ")
        if offset is None:
            return right, right
        sign = "-" if offset < 0 else "+"
        local = (moment + timedelta(minutes=offset)).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{local}{sign}{abs(offset) // 60:02d}:{abs(offset) % 60:02d}", right

    def file(self, name, rows):
        columns = ["station", "time", "value", "unit", "note"][: self.rng.choice([4, 5])]
        self.rng.shuffle(columns)
        end = self.rng.choice(["\n", "\r\n"])
        lines = [",".join("".join(self.rng.choice([c.lower(), c.upper()]) for c in one) for one in columns)]
        for _ in range(rows):
            if self.rng.random() < 0.05:
                lines.append("")
            lines.append(self.row(name, len(lines) + 1, columns))
        text = end.join(lines) + self.rng.choice(["", end])
        mark = self.rng.choice(["", "\ufeff"])
        (self.place / name).write_bytes((mark + text).encode())

    def row(self, name, line, columns):
        time, utc = self.time()
        value, unit, celsius = self.value()
        station, good = self.rng.choice(STATIONS), self.rng.random() > 0.25
        fields = {"station": station, "time": time, "value": value, "unit": unit, "note": "x, y"}
        width = len(columns)
        if not good:
            fault = self.rng.choice(["station", "time", "value", "unit", "width"])
            wrong = {"station": [""], "time": BAD_TIMES, "value": BAD_VALUES, "unit": ["c", "R", ""]}.get(fault)
            if wrong:
                fields[fault] = self.rng.choice(wrong)
                if fields["value"] == "-273.16":
                    fields["unit"] = "C"
            else:
                width += 1
        texts = [fields[one] for one in columns] + [""] * (width - len(columns))
        if good:
            self.good[station, utc] = rounded(celsius)
        else:
            self.bad.append(f"{name}:{line}\n")
        return ",".join(self.quoted(one) for one in texts)

    def quoted(self, text):
        if "," in text or '"' in text or self.rng.random() < 0.1:
            return '"' + text.replace('"', '""') + '"'
        return text

    def right(self):
        lines = ["station,time,celsius\n"]
        for (station, time), celsius in sorted(self.good.items(), key=lambda o: (o[0][0].encode(), o[0][1])):
            if "," in station or '"' in station:
                station = '"' + station.replace('"', '""') + '"'
            lines.append(f"{station},{time},{celsius}\n")
        return "".join(lines), "".join(self.bad)


def read(path):
    """Return a regular file's text, or None."""
    try:
        if not os.path.islink(path) and os.path.isfile(path):
            return pathlib.Path(path).read_bytes().decode("utf-8", "replace")
    except OSError:
        pass
    return None


def difference(said, right):
    if said is None:
        return "no such file"
    for number, (a, b) in enumerate(zip(said.splitlines(), right.splitlines()), start=1):
        if a != b:
            return f"line {number} is {a[:90]!r} instead of {b[:90]!r}"
    return "another number of lines"


def check():
    for path, right in ((OUT, GIVEN), (OUT + ".bad", "may-b.csv:3\n")):
        said = read(path)
        if said != right:
            return f"{path}: {difference(said, right)}"
    for seed, files, rows in ((1, 1, 40), (2, 4, 60), (3, 9, 120), (4, 0, 0)):
        place = tempfile.mkdtemp()
        try:
            os.chmod(place, 0o755)
            inbox, work = os.path.join(place, "in"), os.path.join(place, "out")
            os.mkdir(inbox)
            os.mkdir(work)
            os.chown(work, NOBODY, NOBODY)
            maker = Maker(f"clean-sensor-readings/{seed}", inbox)
            for name in sorted(f"{maker.rng.choice('aBc')}{i:x}.csv" for i in range(files)):
                maker.file(name, rows)
            (maker.place / "notes.txt").write_text("no reading\n")
            out = os.path.join(work, "all.csv")
            ended = subprocess.run(
                [PROGRAM, inbox, out], user=NOBODY, group=NOBODY, extra_groups=[], cwd=work, timeout=60,
                env={"PATH": "/usr/bin:/bin"}, stdin=subprocess.DEVNULL, capture_output=True,
            )  # fmt: skip
            if ended.returncode != 0:
                return f"exit code {ended.returncode}: {ended.stderr[-300:]!r}"
            for path, right in zip((out, out + ".bad"), maker.right(), strict=True):
                if (said := read(path)) != right:
                    return f"{os.path.basename(path)} of made files: {difference(said, right)}"
        finally:
            shutil.rmtree(place, ignore_errors=True)
    return None


def main():
    try:
        problem = check()
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = f"it could not be run: {error}"
    print(problem or "all is right")
    pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": 0.0 if problem else 1.0}))


main()
