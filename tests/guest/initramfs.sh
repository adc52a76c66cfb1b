#!/bin/busybox sh
# First process of the guest: load modules, put the root together, hand over to session.sh.
#
# The disk holds an image store with one image, whose layers are the root's lower directories too:
# the same tree serves as the guest's user land and as the image of its sandboxes.
B=/bin/busybox

$B mkdir -p /proc /sys /dev /disk /root
$B mount -t proc proc /proc
$B mount -t sysfs sysfs /sys
$B mount -t devtmpfs dev /dev
for module in /modules/*.ko; do
	$B insmod "$module" || echo "coldframe: cannot load $module"
done

if $B grep -q coldframe.probe /proc/cmdline; then
	echo "coldframe: alive"
	$B poweroff -f
fi

$B mount -t ext4 -o noatime /dev/vda /disk &&
	$B mount -t overlay -o "lowerdir=$($B cat /disk/lowerdir),upperdir=/disk/root/upper,workdir=/disk/root/work" \
		overlay /root &&
	for made in guest var/lib/coldframe proc sys dev tmp run; do
		$B mkdir -p "/root/$made" || break
	done &&
	$B mount --bind /disk/guest /root/guest &&
	$B mount --bind /disk/home /root/var/lib/coldframe &&
	$B mount --bind /disk/tmp /root/tmp &&
	for kept in proc sys dev; do
		$B mount --move "/$kept" "/root/$kept" || break
	done &&
	$B umount -l /disk &&
	exec $B switch_root /root /guest/session.sh

echo "coldframe: cannot put the root together"
/root/guest/busybox poweroff -f || $B poweroff -f
