"""Fixtures of these tests: tests/fixtures/native.py."""

from tests.fixtures.native import native, native_home

__all__ = ["native", "native_home"]
