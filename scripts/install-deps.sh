#!/usr/bin/env bash
# Installs the Debian packages that building, testing and the lab need. Does nothing where all are there.
set -euo pipefail

packages=(
    # guests
    qemu-system-x86 qemu-utils libvirt-daemon-system libvirt-clients dbus
    # the guest image
    debootstrap debian-archive-keyring busybox-static e2fsprogs
    # libvirt-python is built from source
    libvirt-dev pkg-config gcc libc6-dev python3-dev python3-venv
    # tests of the adapters
    memcached redis-server postgresql
    # the same, with a configuration of its own (the package starts a server on port 80 where that is free)
    nginx
    # tests and benchmarks of the adapters of the JVM and of Spark compile and start services (the adapters need no JDK);
    # jattach is another way to talk to a JVM
    openjdk-17-jdk-headless jattach
    # a real Slurm on loopback, which the tests of the tasks' engines start by themselves
    slurm-wlm slurmctld slurmd slurm-client munge
    # tests of networks; PATH of some minimal systems
    iproute2 ca-certificates
)

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    echo "install-deps: this is no Debian system; install the like of: ${packages[*]}" >&2
    exit 1
fi

missing=()
for package in "${packages[@]}"; do
    state=$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null || true)
    [ "$state" = "install ok installed" ] || missing+=("$package")
done
[ "${#missing[@]}" -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "install-deps: needs root: apt-get install ${missing[*]}" >&2
        exit 1
    fi
    as_root=(sudo)
fi

echo "install-deps: installing ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -q >&2
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}" >&2
