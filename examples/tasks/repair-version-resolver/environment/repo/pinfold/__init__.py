"""Pick the best available version for a requirement."""

from pinfold.resolver import resolve
from pinfold.version import Version, compare

__all__ = ["Version", "compare", "resolve"]
