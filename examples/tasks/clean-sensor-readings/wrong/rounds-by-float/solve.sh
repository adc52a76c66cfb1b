#!/bin/sh
# Computes with floating-point numbers, which round many halves the wrong way.
cat > /srv/sensors/clean <<'END'
#!/usr/bin/python3
import csv
import os
import re
import sys
from datetime import datetime, timezone
from fractions import Fraction

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|[+-]\d\d:\d\d)", re.ASCII)
VALUE = re.compile(r"-?(\d+(\.\d*)?|\.\d+)", re.ASCII)
TO_CELSIUS = {
    "C": lambda v: v,
    "F": lambda v: (v - 32) * 5 / 9,
    "K": lambda v: v - Fraction("273.15"),
}


def two_decimals(value):
    hundredths, rest = divmod(abs(value) * 100, 1)
    hundredths = int(hundredths) + (rest >= Fraction(1, 2))
    sign = "-" if value < 0 and hundredths else ""
    return f"{sign}{hundredths // 100}.{hundredths % 100:02d}"


def reading(row, columns, width):
    if len(row) != width:
        raise ValueError
    station, time, value, unit = (row[one] for one in columns)
    if not station or not TIME.fullmatch(time) or not VALUE.fullmatch(value):
        raise ValueError
    moment = datetime.fromisoformat(time.replace("Z", "+00:00")).astimezone(timezone.utc)
    celsius = Fraction(str(round({"C": lambda v: v, "F": lambda v: (v - 32) * 5 / 9, "K": lambda v: v - 273.15}[unit](float(value)), 2)))
    if celsius < Fraction("-273.15"):
        raise ValueError
    return (station, moment.strftime("%Y-%m-%dT%H:%M:%SZ")), two_decimals(celsius)


def main(inbox, out):
    good, bad = {}, []
    for name in sorted(os.listdir(os.fsencode(inbox))):
        path = os.path.join(os.fsencode(inbox), name)
        if not name.endswith(b".csv") or not os.path.isfile(path):
            continue
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = file.read().replace("\r\n", "\n").split("\n")
        columns = width = None
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = next(csv.reader([line]))
            if columns is None:
                names = [one.lower() for one in row]
                columns = [names.index(one) for one in ("station", "time", "value", "unit")]
                width = len(row)
                continue
            try:
                key, celsius = reading(row, columns, width)
            except (ValueError, KeyError, OverflowError):
                bad.append(name + b":%d\n" % number)
            else:
                good[key] = celsius
    with open(out, "w", encoding="utf-8", newline="") as file:
        file.write("station,time,celsius\n")
        for (station, time), celsius in sorted(good.items(), key=lambda one: (one[0][0].encode(), one[0][1])):
            if "," in station or '"' in station:
                station = '"' + station.replace('"', '""') + '"'
            file.write(f"{station},{time},{celsius}\n")
    with open(out + ".bad", "wb") as file:
        file.writelines(bad)


main(*sys.argv[1:])
END
chmod 755 /srv/sensors/clean
/srv/sensors/clean /srv/sensors/inbox /srv/sensors/readings.csv
