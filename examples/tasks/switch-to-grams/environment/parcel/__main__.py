"""Print quotes as JSON lines: python3 -m parcel ZONE --weight-kg KG, or --manifest FILE."""

import argparse
import csv
import json
import sys

from parcel.quote import quote, total_weight_kg


def read_manifest(path):
    """Return the quotes of a manifest; ValueError says file, line and reason."""
    quotes = []
    with open(path, newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        if next(rows, None) != ["zone", "weight_kg"]:
            raise ValueError(f"{path}:1: the header is not zone,weight_kg")
        for number, row in enumerate(rows, start=2):
            try:
                zone, weight_kg = row
                quotes.append(quote(zone, float(weight_kg)))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    return quotes


def main():
    parser = argparse.ArgumentParser(prog="parcel", allow_abbrev=False)
    parser.add_argument("zone", nargs="?")
    parser.add_argument("--weight-kg", type=float)
    parser.add_argument("--insure", type=int, default=0, metavar="CENTS")
    parser.add_argument("--manifest")
    options = parser.parse_args()
    if options.manifest is None and (options.zone is None or options.weight_kg is None):
        parser.error("give a zone and --weight-kg, or --manifest")
    try:
        if options.manifest is None:
            quotes = [quote(options.zone, options.weight_kg, options.insure)]
        else:
            quotes = read_manifest(options.manifest)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for one in quotes:
        print(json.dumps(one.as_dict()))
    if options.manifest is not None:
        print(json.dumps({"parcels": len(quotes), "weight_kg": total_weight_kg(quotes)}))
    return 0


sys.exit(main())
