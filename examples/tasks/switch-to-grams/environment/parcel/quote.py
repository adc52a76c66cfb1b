"""Quotes: a price with what it is for."""

from dataclasses import asdict, dataclass

from parcel import rates

# Insurance costs 1 % of the value above what is insured anyway, rounded up to a cent.
FREE_INSURANCE_CENTS = 50_000
# Heavy parcels are insured by the kilogram: 3 cents for each started one.
HEAVY_INSURED_FROM_KG = 5.0


@dataclass(frozen=True)
class Quote:
    zone: str
    weight_kg: float
    price_cents: int

    def as_dict(self):
        return asdict(self)


def quote(zone, weight_kg, insured_cents=0):
    """Return the quote for one parcel."""
    price = rates.price(zone, weight_kg)
    return Quote(zone, weight_kg, price + _insurance(weight_kg, insured_cents))


def _insurance(weight_kg, insured_cents):
    above = max(0, insured_cents - FREE_INSURANCE_CENTS)
    if not above:
        return 0
    cents = -(-above // 100)
    if weight_kg > HEAVY_INSURED_FROM_KG:
        cents += 3 * int(-(-weight_kg // 1))
    return cents


def total_weight_kg(quotes):
    """Return the weight of all parcels together in kilograms."""
    return sum(one.weight_kg for one in quotes)
