#!/bin/sh
# The grader writes the reward itself; if it fails there is none, and that is no verdict.
set -eu
mkdir -p /logs/verifier
chmod 700 /tests /logs /logs/verifier
exec python3 -I -S /tests/grade.py
