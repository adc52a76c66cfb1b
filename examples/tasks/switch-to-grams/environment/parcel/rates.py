"""What a parcel costs, by zone and weight."""

import math

# Per zone: (greatest weight in kg, price in cents), ascending.
BANDS = {
    "inland": [(0.5, 380), (1.0, 490), (2.0, 585), (5.0, 770), (10.0, 1095), (31.5, 1095)],
    "nearby": [(0.5, 690), (1.0, 890), (2.0, 1249), (5.0, 1610), (10.0, 2145), (20.0, 2145)],
    "far": [(0.25, 980), (1.0, 1750), (2.5, 2795), (10.0, 4890), (20.0, 4890)],
}
# Above this weight every started kilogram costs extra.
HEAVY_FROM_KG = 10.0
HEAVY_CENTS_PER_KG = {"inland": 55, "nearby": 120, "far": 340}


def price(zone, weight_kg):
    """Return the price in cents of a parcel of some weight in kilograms."""
    if zone not in BANDS:
        raise ValueError(f"unknown zone {zone!r}")
    if weight_kg <= 0:
        raise ValueError("weight must be above 0 kg")
    for limit, cents in BANDS[zone]:
        if weight_kg <= limit:
            return cents + _extra(zone, weight_kg)
    raise ValueError(f"zone {zone} takes up to {BANDS[zone][-1][0]:g} kg")


def _extra(zone, weight_kg):
    started = max(0, math.ceil(weight_kg - HEAVY_FROM_KG))
    return started * HEAVY_CENTS_PER_KG[zone]
