import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from pinfold import Version, compare, resolve


class VersionTest(unittest.TestCase):
    def test_numbers_compare_as_numbers(self):
        self.assertEqual(compare("1.10.0", "1.9.0"), 1)

    def test_numeric_identifiers_compare_as_numbers(self):
        self.assertEqual(compare("1.0.0-rc.2", "1.0.0-rc.10"), -1)

    def test_release_is_above_its_prerelease(self):
        self.assertEqual(compare("1.0.0", "1.0.0-rc.1"), 1)

    def test_nonsense_is_refused(self):
        with self.assertRaises(ValueError):
            Version.parse("latest")


class ResolveTest(unittest.TestCase):
    def test_caret_takes_the_highest_compatible(self):
        self.assertEqual(resolve(["1.0.0", "1.4.2", "2.0.0"], "^1.0.0"), "1.4.2")

    def test_tilde_stays_within_the_minor(self):
        self.assertEqual(resolve(["1.2.3", "1.2.9", "1.3.0"], "~1.2.3"), "1.2.9")

    def test_alternatives_are_joined_by_or(self):
        self.assertEqual(resolve(["1.5.0", "3.1.0"], "^1.0.0 || ^3.0.0"), "3.1.0")

    def test_nothing_fits(self):
        self.assertIsNone(resolve(["1.0.0"], ">1.0.0"))


if __name__ == "__main__":
    unittest.main()
