#!/bin/sh
cat > /srv/config/migrate <<'END'
#!/usr/bin/python3
import json
import os
import re
import sys

NAME = "[A-Za-z0-9_-]+"
SECTION = re.compile(rf"\[\s*(?:(vars)|(template|service)\s+({NAME}))\s*\]")
SETTING = re.compile(rf"({NAME})\s*=\s*(.*)", re.DOTALL)
DOLLAR = re.compile(rf"\$(?:(\$)|\{{({NAME})\}}|)")
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
TRUE, FALSE = ("yes", "on", "true", "1"), ("no", "off", "false", "0")


class Wrong(Exception):
    pass


def read(directory):
    sections = {("vars", ""): {}}
    for name in sorted(os.listdir(os.fsencode(directory))):
        if not name.endswith(b".conf"):
            continue
        with open(os.path.join(os.fsencode(directory), name), encoding="utf-8", newline="") as file:
            lines = file.read().split("\n")
        current = None
        for line in map(str.strip, lines):
            if not line or line[0] in "#;":
                continue
            section, setting = SECTION.fullmatch(line), SETTING.fullmatch(line)
            if section:
                current = sections.setdefault((section[1] or section[2], section[3] or ""), {})
            elif setting and current is not None:
                value = setting[2].strip()
                if len(value) >= 2 and value[0] == value[-1] == '"':
                    value = value[1:-1]
                current[setting[1]] = value
            else:
                raise Wrong(f"{os.fsdecode(name)}: {line!r}")
    return sections


def settings(sections, key, above=()):
    if key in above:
        raise Wrong(f"{key[1]} extends itself")
    if key not in sections:
        raise Wrong(f"no template {key[1]}")
    own = dict(sections[key])
    found = {}
    for parent in replaced(sections, own.pop("extends", "")).split():
        found |= settings(sections, ("template", parent), (*above, key))
    return found | own


def replaced(sections, value):
    def one(match):
        if match[1]:
            return "$"
        if match[2] is None or match[2] not in sections["vars", ""]:
            raise Wrong(f"{value!r}: what is {match[0]!r}?")
        return sections["vars", ""][match[2]]

    return DOLLAR.sub(one, value)


def number(value, least=0, most=float("inf")):
    if not re.fullmatch("[0-9]+", value) or not least <= int(value) <= most:
        raise Wrong(f"{value!r} is no number that fits")
    return int(value)


def boolean(value):
    if value.lower() not in TRUE + FALSE:
        raise Wrong(f"{value!r} is neither yes nor no")
    return value.lower() in TRUE


def seconds(value):
    match = re.fullmatch("([0-9]+)([smh]?)", value)
    if match is None:
        raise Wrong(f"{value!r} is no time")
    return int(match[1]) * SECONDS[match[2]]


def tags(value):
    return list(dict.fromkeys(tag for tag in map(str.strip, value.split(",")) if tag))


def service(sections, name):
    old = {k: replaced(sections, v) for k, v in settings(sections, ("service", name)).items()}
    host, port = old.pop("host", "localhost"), number(old.pop("port", "80"), 1, 65535)
    new = {"listen": f"[{host}]:{port}" if ":" in host else f"{host}:{port}"}
    for key, kind in (("retries", number), ("debug", boolean), ("tags", tags)):
        if key in old:
            new[key] = kind(old.pop(key))
    if "timeout" in old:
        new["timeout_seconds"] = seconds(old.pop("timeout"))
    return new, old


def text(value):
    # TOML's basic strings take JSON's escapes, but for DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")


def main(old, new):
    try:
        sections = read(old)
        lines = []
        for kind, name in sections:
            if kind != "service":
                continue
            values, extra = service(sections, name)
            lines.append(f"[services.{name}]")
            lines += [f"{key} = {text(value)}" for key, value in values.items()]
            if extra:
                lines.append(f"[services.{name}.extra]")
                lines += [f"{key} = {text(value)}" for key, value in extra.items()]
    except (Wrong, UnicodeDecodeError) as error:
        print(str(error).replace("\n", " "), file=sys.stderr)
        return 1
    with open(new, "w", encoding="utf-8", newline="") as file:
        file.write("".join(line + "\n" for line in lines))
    return 0


sys.exit(main(*sys.argv[1:]))
END
chmod 755 /srv/config/migrate
/srv/config/migrate /srv/config/old /srv/config/services.toml
