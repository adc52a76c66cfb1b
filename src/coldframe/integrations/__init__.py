"""Thin translators to and from other tools. Nothing of theirs is imported before it is needed."""
