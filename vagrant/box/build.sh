#!/usr/bin/env bash
# Builds the Vagrant box of manager and hosts, $1 (default: build/ebbtide-debian12.box): Debian 12 of Debian packages
# only, with what a host needs, and without anything of Ebbtide. Root; the network for Debian's packages.
set -euo pipefail

here=$(realpath "$(dirname "$0")")
box=$(realpath -m "${1:-$here/../../build/ebbtide-debian12.box}")
suite=bookworm
disk_gib=20
packages=(
    # a machine that boots, and that Vagrant reaches
    linux-image-amd64 initramfs-tools zstd systemd-sysv systemd-resolved dbus udev kmod openssh-server sudo qemu-guest-agent
    iproute2 ca-certificates python3 python3-apt e2fsprogs less
    # a host of VMs
    libvirt-daemon-system libvirt-clients qemu-system-x86 qemu-utils
    # what the package ebbtide depends on besides
    python3.11 libgcc-s1 libstdc++6
)

[ "$(id -u)" -eq 0 ] || { echo "build: needs root, as debootstrap does" >&2; exit 1; }
for program in debootstrap:debootstrap mke2fs:e2fsprogs qemu-img:qemu-utils unshare:util-linux; do
    command -v "${program%%:*}" >/dev/null || { echo "build: ${program%%:*} is missing: apt install ${program#*:}" >&2; exit 1; }
done
# The key that Vagrant logs in with the first time, and then replaces.
key=$(dpkg -L vagrant 2>/dev/null | grep '/keys/vagrant\.pub$') || { echo "build: apt install vagrant" >&2; exit 1; }
mirror=${EBB_DEBIAN_MIRROR:-$(apt-get indextargets --format '$(ORIGIN)|$(CODENAME)|$(REPO_URI)' |
    sed -n "s/^Debian|$suite|\(http.*\)/\1/p" | head -n 1)}
mirror=${mirror:-https://deb.debian.org/debian}

mkdir -p "$(dirname "$box")"
work=$(mktemp -d "$(dirname "$box")/.box-XXXXXX")
trap 'rm -rf "$work"' EXIT
tree=$work/tree
# Mounts are gone with the name space, however this ends.
in_tree() {
    unshare --mount --pid --fork --kill-child --mount-proc="$tree/proc" chroot "$tree" \
        env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
        ${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} "$@"
}

echo "build: Debian $suite from $mirror" >&2
unshare --mount --propagation private debootstrap --variant=minbase --include=ca-certificates \
    --keyring=/usr/share/keyrings/debian-archive-keyring.gpg "$suite" "$tree" "$mirror" >"$work/log" ||
    { tail -n 5 "$work/log" >&2; exit 1; }
for name in resolv.conf hosts; do
    mv "$tree/etc/$name" "$work/$name" 2>/dev/null || true
    cp --dereference "/etc/$name" "$tree/etc/$name"
done
printf '#!/bin/sh\nexit 101\n' >"$tree/usr/sbin/policy-rc.d"
chmod 755 "$tree/usr/sbin/policy-rc.d"
echo "build: ${#packages[@]} packages and what they need" >&2
in_tree apt-get install -q -y --no-install-recommends "${packages[@]}" >"$work/log" 2>&1 ||
    { tail -n 5 "$work/log" >&2; exit 1; }

in_tree useradd --create-home --shell /bin/bash vagrant
in_tree passwd --lock root >/dev/null
install -D -m 600 "$key" "$tree/home/vagrant/.ssh/authorized_keys"
chmod 700 "$tree/home/vagrant/.ssh"
in_tree chown -R vagrant:vagrant /home/vagrant/.ssh
cp -r "$here/files/." "$tree/"
chmod 440 "$tree/etc/sudoers.d/vagrant"
in_tree systemctl --quiet enable systemd-networkd systemd-resolved ssh-host-keys
in_tree systemctl --quiet mask apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer e2scrub_reap
rm -rf "$tree"/etc/ssh/ssh_host_* "$tree"/var/cache/apt/*.bin "$tree"/var/cache/apt/archives/*.deb \
    "$tree"/var/lib/apt/lists/* "$tree"/usr/share/doc/* "$tree"/usr/share/locale/* "$tree/usr/sbin/policy-rc.d"
: >"$tree/etc/machine-id"
printf '127.0.0.1 localhost\n::1 localhost\n' >"$tree/etc/hosts"
ln -sf ../run/systemd/resolve/stub-resolv.conf "$tree/etc/resolv.conf"
echo ebbtide >"$tree/etc/hostname"

echo "build: disk of $(du -sm "$tree" | cut -f 1) MiB" >&2
cp --dereference "$tree/vmlinuz" "$work/vmlinuz"
cp --dereference "$tree/initrd.img" "$work/initrd.img"
chmod 644 "$work/vmlinuz" "$work/initrd.img"
mke2fs -q -t ext4 -L ebbtide -d "$tree" "$work/disk.raw" "${disk_gib}G" >/dev/null
qemu-img convert -c -o compression_type=zstd -O qcow2 "$work/disk.raw" "$work/box.img"
printf '{"provider": "libvirt", "format": "qcow2", "virtual_size": %d}\n' "$disk_gib" >"$work/metadata.json"
cp "$here/Vagrantfile.box" "$work/Vagrantfile"
tar --create --file "$box" --directory "$work" metadata.json Vagrantfile vmlinuz initrd.img box.img
ls -l --block-size=M "$box" | awk '{ print $5, $9 }'
