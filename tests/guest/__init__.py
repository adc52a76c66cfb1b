"""A machine with pure cgroup v2: Debian's kernel and user land under QEMU. See docs/guest.md."""
