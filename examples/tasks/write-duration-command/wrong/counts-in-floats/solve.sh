#!/bin/sh
# Adds floating-point numbers, which lose digits of long ones.
cat > /srv/dur/dur <<'END'
#!/usr/bin/python3
import re
import sys

UNITS = {"w": 604800, "d": 86400, "h": 3600, "m": 60, "s": 1}
NANO = 10**9
PART = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,9}))?([wdhms])")


def nanoseconds(word):
    """Return a duration exactly; every fraction of a unit is a whole number of nanoseconds."""
    if word == "0":
        return 0
    sign = -1 if word[:1] == "-" else 1
    rest, total, order = word[1:] if word[:1] in ("-", "+") else word, 0, list(UNITS)
    if not rest:
        raise ValueError
    while rest:
        part = PART.match(rest)
        if part is None or part[3] not in order or (part[2] and part.end() != len(rest)):
            raise ValueError
        order = order[order.index(part[3]) + 1 :]
        total += int(float(part[1] + "." + (part[2] or "0")) * NANO) * UNITS[part[3]]
        rest = rest[part.end() :]
    return sign * total


def decimal(nanos):
    whole, fraction = divmod(nanos, NANO)
    return f"{whole}.{fraction:09d}".rstrip("0").rstrip(".") if fraction else str(whole)


def parts(nanos):
    text = ""
    for unit in "wdhm":
        count, nanos = divmod(nanos, UNITS[unit] * NANO)
        text += f"{count}{unit}" if count else ""
    return text + (f"{decimal(nanos)}s" if nanos or not text else "")


def main(words):
    seconds = False
    while words and words[0][:1] == "-" and not re.match(r"-[0-9]", words[0]):
        option = words.pop(0)
        if option == "--":
            break
        if option != "--seconds":
            return 2
        seconds = True
    if not words:
        return 2
    total = 0
    for word in words:
        try:
            total += nanoseconds(word)
        except ValueError:
            print(f"dur: bad duration '{word}'", file=sys.stderr)
            return 1
    print(("-" if total < 0 else "") + (decimal if seconds else parts)(abs(total)))
    return 0


sys.exit(main(sys.argv[1:]))
END
chmod 755 /srv/dur/dur
