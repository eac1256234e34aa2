#!/usr/bin/env bash
# Installs the Debian packages that a purpose needs: `demo` (lab and main scenario) or `test` (every test as well).
# Does nothing where all are there.
set -euo pipefail

purpose=${1:-demo}
packages=(
    # guests
    qemu-system-x86 qemu-utils libvirt-daemon-system libvirt-clients dbus
    # the guest image
    debootstrap debian-archive-keyring busybox-static e2fsprogs
    # libvirt-python is built from source
    libvirt-dev pkg-config gcc libc6-dev python3-dev python3-venv
    # networks of guests; PATH of some minimal systems
    iproute2 ca-certificates
)
case $purpose in
    demo) ;;
    test)
        packages+=(
            # services that the adapters meet; nginx is started by the tests, with a configuration of their own
            memcached redis-server postgresql nginx
            # adapters of the JVM and of Spark: the tests compile and start services (the adapters need no JDK);
            # jattach is another way to talk to a JVM
            openjdk-17-jdk-headless jattach
            # a real Slurm on loopback, which the tests of the tasks' engines start by themselves
            slurm-wlm slurmctld slurmd slurm-client munge
            # the seed of cloud-init
            genisoimage
            # systemd-analyze reads the daemons' units
            systemd
            # validates the Vagrantfiles (15 MB to fetch, 82 MB on disk, with Ruby)
            vagrant vagrant-libvirt
            # a terminal that can be looked at, for `ebb top`
            tmux
            # promtool and a Prometheus of the tests' own, on loopback
            prometheus
            # the browser that the dashboard is tested in, and letters for it
            chromium fonts-dejavu-core
        )
        # TypeScript clients of the OpenAPI documents; Node.js from elsewhere brings its own npm, and will do
        command -v node >/dev/null && command -v npm >/dev/null || packages+=(nodejs npm)
        ;;
    *)
        echo "install-deps: unknown purpose '$purpose'; use demo or test" >&2
        exit 2
        ;;
esac

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
# sudo drops them.
proxies=(${http_proxy:+"http_proxy=$http_proxy"} ${https_proxy:+"https_proxy=$https_proxy"})
"${as_root[@]}" env "${proxies[@]}" DEBIAN_FRONTEND=noninteractive apt-get update -q >&2
# The tests start servers of their own; the packages' would take ports and memory of this machine: none is started now,
# and none that is new here at the next boot. A policy that the machine has stays as it is.
if [ "$purpose" = test ] && [ ! -e /usr/sbin/policy-rc.d ] && [ ! -L /usr/sbin/policy-rc.d ]; then
    policy=$(mktemp)
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    trap 'rm -f "$policy"; "${as_root[@]}" rm -f /usr/sbin/policy-rc.d' EXIT
    "${as_root[@]}" install -m 755 "$policy" /usr/sbin/policy-rc.d
fi
"${as_root[@]}" env "${proxies[@]}" DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}" >&2
if [ "$purpose" = test ] && [ -d /run/systemd/system ]; then
    for package in "${missing[@]}"; do
        case $package in
            memcached | redis-server | postgresql | nginx | munge | slurmctld | slurmd | prometheus)
                "${as_root[@]}" systemctl disable --quiet "$package.service" || true
                ;;
        esac
    done
fi
