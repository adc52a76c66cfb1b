"""Test doubles that speak a real protocol, for what cannot be had on a test machine."""
