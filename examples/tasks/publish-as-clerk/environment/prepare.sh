#!/bin/sh
# What a copy cannot carry: owners, modes, links, a FIFO.
set -eu
cd /srv/inbox
chown -R root:root . && chmod 755 . && chmod 644 ./*.csv
printf 'payroll,987654321\n' > salaries.csv && chmod 600 salaries.csv
ln -s april.csv latest.csv
ln -s /etc/shadow shadow.csv
mkdir archive.csv && cp april.csv archive.csv/march.csv
mkfifo pipe.csv
install -d -o root -g press -m 2775 /srv/outbox
printf 'outdated\n' > /srv/outbox/april.total && chmod 600 /srv/outbox/april.total
printf 'keep me\n' > /srv/outbox/NOTICE && chmod 644 /srv/outbox/NOTICE
