"""The pick."""

from pinfold import requirement
from pinfold.version import Version


def resolve(available, wanted):
    """Return the best of the available version texts for a requirement, or None."""
    alternatives = requirement.parse(wanted)
    best = None
    for text in available:
        version = Version.parse(text)
        if any(requirement.satisfies(version, one) for one in alternatives) and (
            best is None or version.key() >= Version.parse(best).key()
        ):
            best = text
    return best
