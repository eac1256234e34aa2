# Makes a machine of the box the manager of so many hosts ($1). Run again, it changes nothing.
set -euo pipefail

install -d /etc/systemd/network
printf '[Match]\nName=lo\n\n[Network]\nAddress=10.77.0.1/32\n' >/etc/systemd/network/10-lo.network
for number in $(seq "$1"); do
    printf '[Match]\nMACAddress=52:54:00:77:%02x:01\n\n[Network]\nAddress=10.77.%d.1/24\nIPForward=ipv4\n' "$number" "$number" \
        >"/etc/systemd/network/10-host-$number.network"
done
hostnamectl set-hostname manager
networkctl reload

# With the options as they were edited here: dpkg has nobody to ask.
apt-get install -q -y -o Dpkg::Options::=--force-confold /tmp/ebbtide.deb
# An emulated machine is thirty times slower than the hosts that the unit's times are for.
if [ "$(systemd-detect-virt)" = qemu ]; then
    install -d /etc/systemd/system/ebb-manager.service.d
    printf '[Service]\nTimeoutStartSec=15min\nWatchdogSec=10min\n' >/etc/systemd/system/ebb-manager.service.d/emulated.conf
    systemctl daemon-reload
fi
if [ ! -e /etc/ebbtide/tls/ca.key ]; then
    ebb certificates /etc/ebbtide/tls --manager 10.77.0.1
    chgrp -R ebbtide /etc/ebbtide/tls
    chmod 750 /etc/ebbtide/tls
    chmod 640 /etc/ebbtide/tls/*.key
    cat >>/etc/ebbtide/manager.toml <<'END'
listen = "10.77.0.1:7100"
tls_certificate = "/etc/ebbtide/tls/ebb-manager.pem"
tls_key = "/etc/ebbtide/tls/ebb-manager.key"
client_ca = "/etc/ebbtide/tls/ca.pem"
ca_key = "/etc/ebbtide/tls/ca.key"
END
fi
# So that `sudo -i ebb ...` needs no options.
cat >/etc/profile.d/ebbtide.sh <<'END'
export EBB_MANAGER=https://10.77.0.1:7100 EBB_TOKEN_FILE=/etc/ebbtide/token EBB_CA=/etc/ebbtide/tls/ca.pem
END
systemctl enable --now ebb-manager
