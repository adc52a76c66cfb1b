"""Trials per second of Harbor's oracle through our environment and through Harbor's Docker one."""
