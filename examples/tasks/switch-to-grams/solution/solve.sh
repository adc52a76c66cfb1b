#!/bin/sh
set -eu
cd /srv/shop/parcel
cat > rates.py <<'PY'
"""What a parcel costs, by zone and weight."""

# Per zone: (greatest weight in g, price in cents), ascending.
BANDS = {
    "inland": [(500, 380), (1000, 490), (2000, 585), (5000, 770), (10_000, 1095), (31_500, 1095)],
    "nearby": [(500, 690), (1000, 890), (2000, 1249), (5000, 1610), (10_000, 2145), (20_000, 2145)],
    "far": [(250, 980), (1000, 1750), (2500, 2795), (10_000, 4890), (20_000, 4890)],
}
# Above this weight every started kilogram costs extra.
HEAVY_FROM_G = 10_000
HEAVY_CENTS_PER_KG = {"inland": 55, "nearby": 120, "far": 340}


def price(zone, weight_g):
    """Return the price in cents of a parcel of some weight in grams."""
    if type(weight_g) is not int:
        raise TypeError(f"weight_g must be an int, not {type(weight_g).__name__}")
    if zone not in BANDS:
        raise ValueError(f"unknown zone {zone!r}")
    if weight_g <= 0:
        raise ValueError("weight must be above 0 g")
    for limit, cents in BANDS[zone]:
        if weight_g <= limit:
            return cents + _extra(zone, weight_g)
    raise ValueError(f"zone {zone} takes up to {BANDS[zone][-1][0]} g")


def _extra(zone, weight_g):
    started = -(-max(0, weight_g - HEAVY_FROM_G) // 1000)
    return started * HEAVY_CENTS_PER_KG[zone]
PY
cat > quote.py <<'PY'
"""Quotes: a price with what it is for."""

from dataclasses import asdict, dataclass

from parcel import rates

# Insurance costs 1 % of the value above what is insured anyway, rounded up to a cent.
FREE_INSURANCE_CENTS = 50_000
# Heavy parcels are insured by the kilogram: 3 cents for each started one.
HEAVY_INSURED_FROM_G = 5000


@dataclass(frozen=True)
class Quote:
    zone: str
    weight_g: int
    price_cents: int

    def as_dict(self):
        return asdict(self)


def quote(zone, weight_g, insured_cents=0):
    """Return the quote for one parcel."""
    price = rates.price(zone, weight_g)
    return Quote(zone, weight_g, price + _insurance(weight_g, insured_cents))


def _insurance(weight_g, insured_cents):
    above = max(0, insured_cents - FREE_INSURANCE_CENTS)
    if not above:
        return 0
    cents = -(-above // 100)
    if weight_g > HEAVY_INSURED_FROM_G:
        cents += 3 * -(-weight_g // 1000)
    return cents


def total_weight_g(quotes):
    """Return the weight of all parcels together in grams."""
    return sum(one.weight_g for one in quotes)
PY
cat > __main__.py <<'PY'
"""Print quotes as JSON lines: python3 -m parcel ZONE --weight-g GRAMS, or --manifest FILE."""

import argparse
import csv
import json
import re
import sys
from decimal import Decimal

from parcel.quote import quote, total_weight_g


def _grams(text):
    return int(text)


def _grams_of_kilograms(text):
    if not re.fullmatch(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)\s*", text):
        raise ValueError(f"not a number of kilograms: {text!r}")
    grams = Decimal(text.strip()) * 1000
    if grams != int(grams):
        raise ValueError(f"not a whole number of grams: {text} kg")
    return int(grams)


# Old manifests count in kilograms.
HEADERS = {("zone", "weight_g"): _grams, ("zone", "weight_kg"): _grams_of_kilograms}


def read_manifest(path):
    """Return the quotes of a manifest; ValueError says file, line and reason."""
    quotes = []
    with open(path, newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        to_grams = HEADERS.get(tuple(next(rows, ())))
        if to_grams is None:
            raise ValueError(f"{path}:1: the header is not zone,weight_g")
        for number, row in enumerate(rows, start=2):
            try:
                zone, weight = row
                quotes.append(quote(zone, to_grams(weight)))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    return quotes


def main():
    parser = argparse.ArgumentParser(prog="parcel", allow_abbrev=False)
    parser.add_argument("zone", nargs="?")
    parser.add_argument("--weight-g", type=int, metavar="GRAMS")
    parser.add_argument("--insure", type=int, default=0, metavar="CENTS")
    parser.add_argument("--manifest")
    options = parser.parse_args()
    if options.manifest is None and (options.zone is None or options.weight_g is None):
        parser.error("give a zone and --weight-g, or --manifest")
    try:
        if options.manifest is None:
            quotes = [quote(options.zone, options.weight_g, options.insure)]
        else:
            quotes = read_manifest(options.manifest)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for one in quotes:
        print(json.dumps(one.as_dict()))
    if options.manifest is not None:
        print(json.dumps({"parcels": len(quotes), "weight_g": total_weight_g(quotes)}))
    return 0


sys.exit(main())
PY
cd .. && PYTHONDONTWRITEBYTECODE=1 python3 -m parcel inland --weight-g 1200 | grep -q '"price_cents": 585'
