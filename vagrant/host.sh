# Makes a machine of the box host number $1, which has still to join. Run again, it changes nothing.
set -euo pipefail

install -d /etc/systemd/network
cat >/etc/systemd/network/10-manager.network <<END
[Match]
MACAddress=52:54:00:77:$(printf %02x "$1"):02

[Network]
Address=10.77.$1.2/24

[Route]
Destination=10.77.0.0/16
Gateway=10.77.$1.1
END
hostnamectl set-hostname "host-$1"
networkctl reload
apt-get install -q -y /tmp/ebbtide.deb
# An emulated machine is thirty times slower than the hosts that the unit's times are for.
if [ "$(systemd-detect-virt)" = qemu ]; then
    install -d /etc/systemd/system/ebb-hostagent.service.d
    printf '[Service]\nTimeoutStartSec=15min\nWatchdogSec=10min\n' >/etc/systemd/system/ebb-hostagent.service.d/emulated.conf
    systemctl daemon-reload
fi
