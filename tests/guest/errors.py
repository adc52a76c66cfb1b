"""The one error of the guest lane."""

from __future__ import annotations


class GuestError(Exception):
    """The guest could not be made, or ended without saying how its command did."""
