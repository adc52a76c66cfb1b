#!/bin/sh
# Process 1 of the guest once its root stands: mount what systemd would, run one command, end.
#
# Ports: 1 carries the command's output, 2 its exit code. The console carries the kernel's words.
B=/guest/busybox
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8

$B mkdir -p /dev/pts /dev/shm
$B mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
$B mount -t tmpfs -o nosuid,nodev tmpfs /dev/shm
$B mount -t tmpfs -o nosuid,nodev,mode=755 tmpfs /run
$B mount -t securityfs securityfs /sys/kernel/security
$B ln -s /proc/self/fd /dev/fd
$B mount -t cgroup2 -o nsdelegate,memory_recursiveprot cgroup2 /sys/fs/cgroup
$B ifconfig lo up
$B hostname guest
$B mkdir /run/coldframe-guest
[ -e /bin/busybox ] || $B cp "$B" /bin/busybox # tests make images of it

# What `Delegate=yes` gives a service: every controller, in a cgroup that is its own.
delegated=/sys/fs/cgroup/system.slice/coldframe-guest.service
$B mkdir -p "$delegated"
for level in /sys/fs/cgroup /sys/fs/cgroup/system.slice; do
	for controller in $($B cat $level/cgroup.controllers); do
		case $controller in
		cpu | cpuset | io | memory | pids) echo "+$controller" >$level/cgroup.subtree_control ;;
		esac
	done
done
ulimit -Hn 524288
output=$(echo /dev/vport*p1) status=$(echo /dev/vport*p2)

(
	echo 0 >"$delegated/cgroup.procs"
	cd /guest/repository && exec sh /guest/command
) </dev/null >"$output" 2>&1
echo $? >"$status"

$B poweroff -f
