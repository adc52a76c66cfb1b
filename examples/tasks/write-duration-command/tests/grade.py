"""Grade the command against durations of the grader's own."""

import json
import os
import pathlib
import random
import subprocess
from fractions import Fraction

COMMAND = "/srv/dur/dur"
NOBODY = 65534
UNITS = {"w": 604800, "d": 86400, "h": 3600, "m": 60, "s": 1}

# (words, exit code, standard output, standard error)
FIXED = [
    (["1h30m", "45m"], 0, "2h15m", ""), (["0"], 0, "0s", ""), (["-0.5h"], 0, "-30m", ""), (["1h0.25m"], 0, "1h15s", ""),
    (["+2w", "-1s"], 0, "1w6d23h59m59s", ""), (["0.000000001s"], 0, "0.000000001s", ""), (["1d", "0.5s"], 0, "1d0.5s", ""),
    (["--seconds", "90m"], 0, "5400", ""), (["--seconds", "-0.5s"], 0, "-0.5", ""), (["--seconds", "1m", "-60s"], 0, "0", ""),
    (["--", "-5m", "1m"], 0, "-4m", ""), (["--seconds", "--", "1.50s"], 0, "1.5", ""), (["-5m"], 0, "-5m", ""),
    (["0.1s"] * 10, 0, "1s", ""), (["0.1s", "0.2s"], 0, "0.3s", ""), (["00h"], 0, "0s", ""), (["-0s"], 0, "0s", ""),
    (["999999999999w", "0.000000001s"], 0, "999999999999w0.000000001s", ""), (["0.000000001w"], 0, "0.0006048s", ""),
    (["1.5s0m"], 1, "", "1.5s0m"), (["1m", "1m30", "x"], 1, "", "1m30"), (["1m1h"], 1, "", "1m1h"), (["1h1h"], 1, "", "1h1h"),
    (["1.5h3m"], 1, "", "1.5h3m"), ([".5h"], 1, "", ".5h"), (["5"], 1, "", "5"), (["1 h"], 1, "", "1 h"), (["1H"], 1, "", "1H"),
    ([""], 1, "", ""), (["1.h"], 1, "", "1.h"), (["1234567890123s"], 1, "", "1234567890123s"), (["0.1234567891s"], 1, "", "0.1234567891s"),
    (["+"], 1, "", "+"), (["+-1h"], 1, "", "+-1h"), (["1h-1m"], 1, "", "1h-1m"), (["1m\n"], 1, "", "1m\n"), (["-0"], 1, "", "-0"),
    (["\u0661h"], 1, "", "\u0661h"), (["1m", "--seconds"], 1, "", "--seconds"), (["1m", "-x"], 1, "", "-x"), (["--", "--seconds"], 1, "", "--seconds"),
    (["00"], 1, "", "00"), ([], 2, "", None), (["--seconds"], 2, "", None), (["--"], 2, "", None), (["-x", "1m"], 2, "", None),
    (["--minutes", "1m"], 2, "", None), (["-"], 2, "", None), (["-h"], 2, "", None), (["--second", "1m"], 2, "", None),
]  # fmt: skip


def made(rng):
    """Return (word, seconds)."""
    units = sorted(rng.sample(list(UNITS), rng.randint(1, 5)), key=list(UNITS).index)
    text, value = rng.choice(["", "", "-", "+"]), Fraction(0)
    for unit in units:
        number = str(rng.randint(0, 10 ** rng.randint(1, 12) - 1))
        if unit == units[-1] and rng.random() < 0.6:
            number += "." + "".join(rng.choices("0123456789", k=rng.randint(1, 9)))
        text, value = text + number + unit, value + Fraction(number) * UNITS[unit]
    return text, -value if text[0] == "-" else value


def decimal(value):
    nanos = value * 10**9
    assert nanos.denominator == 1
    digits = str(nanos.numerator).rjust(10, "0")
    return (digits[:-9] + "." + digits[-9:]).rstrip("0").rstrip(".")


def right(value, seconds):
    sign, value = "-" if value < 0 else "", abs(value)
    if seconds:
        return sign + decimal(value)
    text = ""
    for unit in "wdhm":
        count, value = divmod(value, UNITS[unit])
        text += f"{count}{unit}" if count else ""
    return sign + (text + (decimal(value) + "s" if value else "") or "0s")


def run(words):
    ended = subprocess.run(
        [COMMAND, *words], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", timeout=20, capture_output=True,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return ended.returncode, ended.stdout.decode("utf-8", "replace"), ended.stderr.decode("utf-8", "replace")


def check():
    rng = random.Random("write-duration-command/1")
    cases = list(FIXED)
    for number in range(150):
        several = [made(rng) for _ in range(rng.randint(1, 6))]
        seconds = number % 3 == 0
        total = right(sum(value for _, value in several), seconds)
        words = (["--seconds"] if seconds else []) + [word for word, _ in several]
        cases.append((words if words[0][0] != "-" or words[0][1].isdigit() or seconds else ["--", *words], 0, total, ""))
    for words, code, out, error in cases:
        said = run(words)
        wanted_out = out + "\n" if code == 0 else ""
        wanted_error = f"dur: bad duration '{error}'\n" if code == 1 else error
        if said[:2] != (code, wanted_out) or wanted_error not in {None, said[2]}:
            return f"dur {words}: {said} instead of {(code, wanted_out, wanted_error)}"
    return None


def main():
    try:
        problem = check() if os.path.isfile(COMMAND) else f"{COMMAND}: no such file"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = f"it could not be run: {error}"
    print(problem or "all is right")
    pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": 0.0 if problem else 1.0}))


main()
