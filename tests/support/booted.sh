#!/usr/bin/env bash
# booted.sh PLACE FILES TREES...: a systemd of its own in namespaces, on a copy-on-write view of this host.
# Run below `unshare --mount --pid --fork --cgroup --ipc --uts --net`. FILES is laid over the root; each of TREES is
# FROM:TO, to be seen there read-only. Nothing it does reaches the host, and all of it ends with its first process.
set -euo pipefail
place=$1 files=$2
shift 2
root=$place/root

ip link set lo up
mount --make-rprivate /
mkdir -p "$place/layer" "$root"
mount -t tmpfs tmpfs "$place/layer"
mkdir "$place/layer/upper" "$place/layer/work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$place/layer/upper,workdir=$place/layer/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
mount --rbind /dev "$root/dev"
rm -rf "$root"/etc/systemd/system/*.wants "$root"/var/lib/adaptersync # of this host
for tree in "$@"; do
    mkdir -p "$root/${tree#*:}"
    mount --bind -o ro "${tree%%:*}" "$root/${tree#*:}"
done
cp -r "$files/." "$root/"
mkdir "$root/before"
cd "$root"
pivot_root . before
umount -l /before
mount --make-rshared / # credentials reach units through it
export container=lxc PATH=/usr/sbin:/usr/bin:/sbin:/bin
exec /lib/systemd/systemd --unit=rehearsal.target --log-target=console --show-status=no </dev/null
