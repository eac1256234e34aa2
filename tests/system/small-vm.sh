# Makes /var/lib/libvirt/images/small/{vmlinuz,initrd}: this machine's own kernel, busybox and the balloon's driver, all
# in memory. It says on its console how much memory it has, and waits.
set -eu
home=/var/lib/libvirt/images/small tree=$(mktemp -d)
mkdir -p "$home" "$tree"/bin "$tree"/dev "$tree"/proc "$tree"/sys "$tree"/modules "$tree"/lib/x86_64-linux-gnu "$tree"/lib64
cp "/boot/vmlinuz-$(uname -r)" "$home/vmlinuz"
cp /bin/busybox "$tree/bin/"
ldd /bin/busybox | grep -o '/lib[^ ]*' | while read -r file; do cp -L "$file" "$tree$file"; done
for name in virtio_pci virtio_balloon; do modprobe --show-depends "$name"; done |
    awk '$1 == "insmod" && !seen[$2]++ { print $2 }' >"$tree/modules.order"
while read -r file; do
    cp "$file" "$tree/modules/"
    echo "insmod /modules/${file##*/}" >>"$tree/load"
done <"$tree/modules.order"
cat >"$tree/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox mkdir -p /usr/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
. /load
grep MemTotal /proc/meminfo
echo "small VM is up"
while :; do sleep 3600; done
INIT
chmod 755 "$tree/init"
(cd "$tree" && find . | cpio --quiet -o -H newc | gzip -1) >"$home/initrd"
rm -r "$tree"
chmod 644 "$home"/*
ls -l "$home"
