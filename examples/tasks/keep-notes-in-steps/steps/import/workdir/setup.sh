#!/bin/sh
# Adds to the inbox what no directory of files can hold.
set -eu
cd /srv/notes/inbox
mkfifo pipe.txt
ln -s b.txt z.txt
mkdir d.txt
