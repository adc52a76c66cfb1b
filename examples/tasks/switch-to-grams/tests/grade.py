"""Grade the change: the package against a price list of the grader's own."""

import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import tempfile

PACKAGE = "/srv/shop/parcel"
FILES = ["__init__.py", "__main__.py", "quote.py", "rates.py"]
NOBODY = 65534

LIMITS = {
    "inland": {500: 380, 1000: 490, 2000: 585, 5000: 770, 31500: 1095},
    "nearby": {500: 690, 1000: 890, 2000: 1249, 5000: 1610, 20000: 2145},
    "far": {250: 980, 1000: 1750, 2500: 2795, 20000: 4890},
}
HEAVY = {"inland": 55, "nearby": 120, "far": 340}


def started_kilograms(grams):
    return (grams + 999) // 1000


def price(zone, grams, insured=0):
    """Return cents, or the exact message of the ValueError."""
    if zone not in LIMITS:
        return f"unknown zone {zone!r}"
    if grams <= 0:
        return "weight must be above 0 g"
    fitting = [cents for limit, cents in LIMITS[zone].items() if grams <= limit]
    if not fitting:
        return f"zone {zone} takes up to {max(LIMITS[zone])} g"
    cents = fitting[0]
    if grams > 10_000:
        cents += started_kilograms(grams - 10_000) * HEAVY[zone]
    if insured > 50_000:
        cents += (insured - 50_000 + 99) // 100
        if grams > 5000:
            cents += 3 * started_kilograms(grams)
    return cents


def weights(rng):
    edges = [limit + d for bands in LIMITS.values() for limit in bands for d in (-1, 0, 1)]
    edges += [1, 0, -1, -500, 10_000, 10_001, 11_000, 11_001, 10**9, 3, 30]
    return edges + [rng.randint(1, 33_000) for _ in range(300)]


def make_calls(rng):
    """Return [(call, right answer)]; a right answer of TypeError leaves the message free."""
    pairs = []
    for grams in weights(rng):
        zone = rng.choice([*LIMITS, *LIMITS, "moon"])
        insured = rng.choice([0, 0, 49_999, 50_000, 50_001, rng.randint(0, 300_000)])
        plain, full = price(zone, grams), price(zone, grams, insured)
        pairs.append((["price", [zone, grams], {}], ["value" if isinstance(plain, int) else "ValueError", plain]))
        right = ["ValueError", full]
        if isinstance(full, int):
            right = ["value", {"zone": zone, "weight_g": grams, "price_cents": full}]
        pairs.append((["quote", [zone], {"weight_g": grams, "insured_cents": insured}], right))
    for name in ("price", "quote"):
        for bad in (1.0, 1200.0, True, "500", None):
            pairs.append(([name, ["inland", bad], {}], ["TypeError", None]))
        pairs.append(([name, ["inland"], {"weight_kg": 1}], ["TypeError", None]))
    return pairs


def unprivileged(arguments, cwd, **keywords):
    return subprocess.run(
        arguments, cwd=cwd, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, timeout=60,
        env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}, **keywords,
    )  # fmt: skip


def check_files():
    found = sorted(
        os.path.relpath(os.path.join(root, name), PACKAGE)
        for root, _, names in os.walk(PACKAGE)
        for name in names
        if "__pycache__" not in root
    )
    if found != FILES:
        return f"the package holds {found}"
    if pathlib.Path(PACKAGE, "__init__.py").read_bytes():
        return "__init__.py was changed"
    for name in ("quote.py", "rates.py"):
        text = pathlib.Path(PACKAGE, name).read_text(encoding="utf-8")
        if re.search(r"weight[_-]?kg", text, re.IGNORECASE):
            return f"{name} still speaks of weight_kg"
    if "weight-kg" in pathlib.Path(PACKAGE, "__main__.py").read_text(encoding="utf-8"):
        return "__main__.py still speaks of weight-kg"
    return None


def check_modules(place):
    pairs = make_calls(random.Random("switch-to-grams/1"))
    driver = pathlib.Path("/tests/driver.py").read_text()
    ended = unprivileged(["python3", "-c", driver], place, input=json.dumps([c for c, _ in pairs]).encode())
    try:
        said = json.loads(ended.stdout)
        answers = said.pop("answers")
    except (ValueError, KeyError, AttributeError):
        return f"the modules gave no answers: {ended.stderr[-300:]!r}"
    right = {
        "price": ["zone", "weight_g"], "quote": ["zone", "weight_g", "insured_cents"],
        "fields": ["zone", "weight_g", "price_cents"], "attribute": 1200, "total": 2000, "old": False,
    }  # fmt: skip
    if said != right:
        return f"{said} instead of {right}"
    for (call, right), answer in zip(pairs, answers, strict=True):
        if answer != right and not (right[0] == answer[0] == "TypeError"):
            return f"{call}: {answer} instead of {right}"
        if json.dumps(answer) != json.dumps(right) and right[0] == "value":
            return f"{call}: {answer} holds other types than {right}"
    return None


def command(place, *arguments):
    ended = unprivileged(["python3", "-m", "parcel", *arguments], place, stdin=subprocess.DEVNULL)
    return ended.returncode, ended.stdout.decode("utf-8", "replace"), ended.stderr.decode("utf-8", "replace")


def check_command(place):
    for zone, grams, insured in [("inland", 1200, 0), ("far", 12_345, 99_999), ("nearby", 20_000, 50_001)]:
        said = command(place, zone, "--weight-g", str(grams), "--insure", str(insured))
        right = {"zone": zone, "weight_g": grams, "price_cents": price(zone, grams, insured)}
        if said != (0, json.dumps(right) + "\n", ""):
            return f"{zone} --weight-g {grams}: {said}"
    for bad in (["inland", "--weight-kg", "1"], ["inland", "--weight-g", "1.5"], ["inland", "--weight", "1"], ["inland"]):
        code, out, err = command(place, *bad)
        if code != 2 or out or not err:
            return f"{bad}: exit {code}, {out!r}"
    code, out, err = command(place, "far", "--weight-g", "20001")
    if (code, out, err.strip()) != (1, "", "zone far takes up to 20000 g"):
        return f"too heavy: exit {code}, {out!r}, {err!r}"
    return None


def check_manifests(place):
    rng = random.Random("switch-to-grams/2")
    path = os.path.join(place, "manifest.csv")
    for header in ("weight_g", "weight_kg"):
        rows = [(rng.choice(list(LIMITS)), rng.randint(1, 20_000)) for _ in range(400)]
        rows += [("inland", grams) for grams in (1005, 4035, 8290, 1, 500, 31_500, 16_001)]
        texts = [str(g) if header == "weight_g" else as_kilograms(rng, g) for _, g in rows]
        lines = [f"{zone},{text}\n" for (zone, _), text in zip(rows, texts, strict=True)]
        pathlib.Path(path).write_text(f"zone,{header}\n" + "".join(lines))
        right = [{"zone": z, "weight_g": g, "price_cents": price(z, g)} for z, g in rows]
        right.append({"parcels": len(rows), "weight_g": sum(g for _, g in rows)})
        said = command(place, "--manifest", path)
        if said != (0, "".join(json.dumps(one) + "\n" for one in right), ""):
            return f"a manifest with {header}: exit {said[0]}, {said[2]!r}, {first_difference(said[1], right)}"
    return check_bad_manifests(place, path)


def as_kilograms(rng, grams):
    text = f"{grams // 1000}.{grams % 1000:03d}"
    return text.rstrip("0").rstrip(".") if rng.random() < 0.7 else text


def first_difference(out, right):
    for line, one in zip(out.splitlines(), right):
        if line != json.dumps(one):
            return f"{line!r} instead of {json.dumps(one)!r}"
    return "another number of lines"


def check_bad_manifests(place, path):
    cases = [
        ("zone,weight_kg\ninland,0.0005\n", 2), ("zone,weight_kg\ninland,1\nfar,1.2345\n", 3),
        ("zone,weight_g\ninland,1\ninland,1.5\n", 3), ("zone,weight_g\ninland,0.5\n", 2),
        ("zone,weight_g\ninland,\n", 2), ("zone,weight_g\nmoon,5\n", 2), ("zone,weight_g\ninland,31501\n", 2),
        ("zone,weight_kg\ninland,31.501\n", 2), ("zone,weight_g\ninland,5,6\n", 2), ("zone,weight_g\ninland,1\ninland\n", 3),
        ("zone,weight_kg\ninland,much\n", 2), ("zone,weight\ninland,1\n", 1), ("zone,weight_g\ninland,-3\n", 2), ("", 1),
    ]  # fmt: skip
    for content, line in cases:
        pathlib.Path(path).write_text(content)
        code, out, err = command(place, "--manifest", path)
        if code != 1 or out or not err.startswith(f"{path}:{line}: ") or err.strip().count("\n"):
            return f"manifest {content!r}: exit {code}, {out!r}, {err!r}"
    return None


def check():
    problem = check_files()
    if problem:
        return problem
    place = tempfile.mkdtemp()
    try:
        os.chmod(place, 0o755)
        target = os.path.join(place, "parcel")
        os.mkdir(target)
        for name in FILES:
            shutil.copyfile(os.path.join(PACKAGE, name), os.path.join(target, name))
        return check_modules(place) or check_command(place) or check_manifests(place)
    except subprocess.TimeoutExpired:
        return "the package does not come to an end"
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    problem = check()
    print(problem or "all as it should be")
    pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": 0.0 if problem else 1.0}))
