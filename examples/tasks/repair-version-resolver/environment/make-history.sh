#!/bin/sh
# Give the repository a short past. Nothing in it, reachable or not, holds the repair.
set -eu
cd /srv/pinfold
export GIT_AUTHOR_DATE='2024-03-04T09:00:00+00:00' GIT_COMMITTER_DATE='2024-03-04T09:00:00+00:00'
git init -q -b main
git config user.name 'Pinfold maintainers'
git config user.email 'maintainers@pinfold.invalid'
git add README.md pinfold/version.py
git commit -q -m 'Parse and compare versions'
git add pinfold/requirement.py
git commit -q -m 'Add requirements with caret and tilde'
git add .
git commit -q -m 'Resolve a requirement against a list'
