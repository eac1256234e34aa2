#!/usr/bin/env bash
# Builds into dist/, or $2: wheel, sdist and Debian package of ebbtide; for guests a wheel, one file (ebb-guestagent.pyz)
# with its unit, and a Debian package. $1: the Python that builds, which has setuptools. The network is needed only for what
# requirements.lock names, as pip is set up; with --bare as $3 not even for that: the Debian package of ebbtide is then
# without it, for looking at the rest. A build that fails leaves the folder as it was; packages of before make room.
set -euo pipefail

python=$(realpath -s "$1")
bare=${3:-}
host=yes
if [ -z "$bare" ] && [ "$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")')" != 3.11 ]; then
    echo "packages: $python is not Python 3.11, which requirements.lock and Debian 12 have: no Debian package for hosts" >&2
    host=
fi
if ! "$python" -c 'import setuptools' 2>/dev/null; then
    echo "packages: $python has no setuptools: $python -m pip install setuptools" >&2
    exit 1
fi
folder=$(realpath -m "${2:-$(dirname "$0")/../dist}")
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD
version=$("$python" -c 'import guestagent; print(guestagent.__version__)')
# The same commit makes the same files.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
export SOURCE_DATE_EPOCH
# Debian's: before the release that it becomes, and higher from commit to commit, since apt passes over an equal one.
deb=$version
[[ $version != *.dev* ]] || deb="${version/.dev/\~dev}+$(date --utc +%Y%m%d%H%M --date "@$SOURCE_DATE_EPOCH")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
dist=$work/dist
mkdir "$dist"
wheel() { "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$dist" "$1"; }

# From a copy: setuptools leaves folders in the tree that it builds.
mkdir "$work/ebbtide" "$work/guest"
git ls-files -z ebbtide hostagent guestagent cluster_manager app_adapters pyproject.toml README.md LICENSE |
    xargs -0 cp --parents --target-directory "$work/ebbtide"
wheel "$work/ebbtide"
(cd "$work/ebbtide" && "$python" -c 'from setuptools import build_meta; build_meta.build_sdist("sdist")' >/dev/null)
cp "$work"/ebbtide/sdist/*.tar.gz "$dist/"

git ls-files -z guestagent app_adapters | xargs -0 cp --parents --target-directory "$work/guest"
cp packaging/guest/pyproject.toml "$work/guest/"
# Files of one time, so that archives do not differ.
mkdir "$work/zip"
cp -r "$work/guest/guestagent" "$work/guest/app_adapters" "$work/zip/"
printf 'import sys\n\nfrom guestagent.main import main\n\nsys.exit(main())\n' >"$work/zip/__main__.py"
find "$work/zip" -exec touch --date "@$SOURCE_DATE_EPOCH" {} +
"$python" -m zipapp "$work/zip" --python '/usr/bin/env python3' --output "$dist/ebb-guestagent.pyz"
install -m 644 packaging/systemd/ebb-guestagent.service "$dist/"

# $1: the tree of a Debian package, but for what every one has; $2: its name; $3: its architecture; standard input: more
# of its control file. The same tree makes the same file.
debian() {
    local root=$1 name=$2 doc=$1/usr/share/doc/$2
    install -d "$root/DEBIAN" "$doc"
    printf 'Ebbtide\n\nCopyright %s the authors of Ebbtide\n\nLicence: Apache-2.0, see /usr/share/common-licenses/Apache-2.0\n' \
        "$(date --utc +%Y --date "@$SOURCE_DATE_EPOCH")" >"$doc/copyright"
    printf '%s (%s) stable; urgency=medium\n\n  * See CHANGELOG.md of the source.\n\n -- %s  %s\n' "$name" "$deb" \
        "$maintainer" "$(date --utc --rfc-email --date "@$SOURCE_DATE_EPOCH")" | gzip -9n >"$doc/changelog.gz"
    "$python" scripts/man_pages.py "$name" "$root/usr/share/man"
    chmod -R u=rwX,go=rX "$root"
    (cd "$root" && find etc -type f -printf '/%p\n' | sort) >"$root/DEBIAN/conffiles"
    (cd "$root" && find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
    {
        printf 'Package: %s\nVersion: %s\nArchitecture: %s\nMaintainer: %s\nInstalled-Size: %s\n' "$name" "$deb" "$3" \
            "$maintainer" "$(du --apparent-size -sk --exclude DEBIAN "$root" | cut -f1)"
        printf 'Section: admin\nPriority: optional\n'
        cat
    } >"$root/DEBIAN/control"
    find "$root" -exec touch --no-dereference --date "@$SOURCE_DATE_EPOCH" {} +
    dpkg-deb --root-owner-group -Zxz -z3 --build "$root" "$dist" >/dev/null
}
maintainer='Ebbtide maintainers <maintainers@ebbtide.invalid>'

root=$work/guest-deb
install -d "$root/DEBIAN" "$root/usr/lib/ebbtide-guest" "$root/usr/bin" "$root/lib/systemd/system" \
    "$root/etc/ebbtide/adapters.d" "$root/etc/ebbtide/preempt.d" "$root/etc/logrotate.d" \
    "$root/usr/lib/python3/dist-packages"
cp -r "$work/guest/guestagent" "$work/guest/app_adapters" "$root/usr/lib/ebbtide-guest/"
# A service that embeds an adapter imports app_adapters.
echo /usr/lib/ebbtide-guest >"$root/usr/lib/python3/dist-packages/ebbtide-guest.pth"
for program in ebb-guestagent:guestagent ebb-adapter:app_adapters; do
    printf '#!/usr/bin/python3\nimport sys\n\nsys.path.insert(0, "/usr/lib/ebbtide-guest")\n\nfrom %s.main import main\n\nsys.exit(main())\n' \
        "${program#*:}" >"$root/usr/bin/${program%:*}"
done
chmod 755 "$root"/usr/bin/*
install -m 644 packaging/systemd/ebb-guestagent.service "$root/lib/systemd/system/"
"$python" -m guestagent --example-config >"$root/etc/ebbtide/guestagent.toml"
install -m 644 packaging/guest/logrotate "$root/etc/logrotate.d/ebbtide-guest"
install -m 755 packaging/guest/preinst packaging/guest/postinst packaging/guest/prerm packaging/guest/postrm "$root/DEBIAN/"
debian "$root" ebbtide-guest all <<'EOF'
Depends: python3 (>= 3.8)
Description: Ebbtide inside a guest
 The guest agent tells the host which CPUs and how much memory the guest can
 spare, takes CPUs off and on line, and relays requests to the applications;
 ebb-adapter makes memcached, Redis, PostgreSQL, a JVM, Spark or a web server
 one of them.
EOF
wheel "$work/guest"

# $dist becomes the folder's. Nothing else that is there: it may be anybody's.
deliver() {
    ls -l "$dist" | awk 'NR > 1 { print $5, $9 }'
    mkdir -p "$folder"
    rm -f "$folder"/ebbtide{-,_}*.{whl,tar.gz,deb} "$folder"/ebb-guestagent.{pyz,service}
    mv "$dist"/* "$folder/"
}
if [ -z "$host" ]; then
    deliver
    exit
fi

# Manager, host agent and commands, in a virtual environment of Debian 12's Python with what requirements.lock names.
root=$work/ebbtide-deb
home=usr/lib/ebbtide
install -d "$root/DEBIAN" "$root/$home/bin" "$root/usr/bin" "$root/lib/systemd/system" "$root/usr/lib/sysusers.d" \
    "$root/etc/ebbtide" "$root/usr/share/bash-completion/completions" "$root/usr/share/zsh/vendor-completions" \
    "$root/usr/share/ebbtide" "$root/usr/share/lintian/overrides"
ln -s /usr/bin/python3.11 "$root/$home/bin/python3"
printf 'home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.11\n' >"$root/$home/pyvenv.cfg"
for program in ebb:ebbtide.cli.main ebb-manager:cluster_manager.main ebb-hostagent:hostagent.__main__; do
    printf '#!/%s/bin/python3 -I\nimport sys\n\nfrom %s import main\n\nsys.exit(main())\n' "$home" "${program#*:}" \
        >"$root/$home/bin/${program%:*}"
    chmod 755 "$root/$home/bin/${program%:*}"
    ln -s "../lib/ebbtide/bin/${program%:*}" "$root/usr/bin/${program%:*}"
done
if [ -z "$bare" ]; then
    pip=("$python" -m pip --quiet --disable-pip-version-check)
    "${pip[@]}" wheel --require-hashes --no-build-isolation --wheel-dir "$work/wheels" --requirement requirements.lock
    # By name, not by file: no path of this machine gets into the package.
    "${pip[@]}" install --no-index --find-links "$work/wheels" --find-links "$dist" --no-compile \
        --target "$root/$home/lib/python3.11/site-packages" "ebbtide[host,postgresql,certificates,dask]==$version"
    (
        cd "$root/$home/lib/python3.11/site-packages"
        rm -rf bin
        find . -name tests -type d -prune -exec rm -rf {} +
        strip --strip-unneeded libvirtmod*.so
        find . -name '*.so*' -type f -exec chmod 644 {} +
        # Here, since an emulated machine takes ten minutes for it; never checked against the source again.
        PYTHONHASHSEED=0 "$python" -m compileall -q --invalidation-mode unchecked-hash -d "/$home/lib/python3.11/site-packages" .
    )
fi
for daemon in manager hostagent; do
    install -m 644 "packaging/systemd/ebb-$daemon.service" "$root/lib/systemd/system/"
done
"$python" -m ebbtide.cli.main config example manager >"$root/etc/ebbtide/manager.toml"
# Not below /etc: `ebb-hostagent join` rewrites the file there, and an upgrade would ask about it on every host.
"$python" -m ebbtide.cli.main config example hostagent >"$root/usr/share/ebbtide/hostagent.toml"
# The package makes this file.
sed -i 's/^#\(token_file = \)/\1/' "$root/etc/ebbtide/manager.toml"
install -m 644 packaging/debian/sysusers.conf "$root/usr/lib/sysusers.d/ebbtide.conf"
install -m 644 packaging/debian/lintian-overrides "$root/usr/share/lintian/overrides/ebbtide"
for shell in bash:bash-completion/completions/ebb zsh:zsh/vendor-completions/_ebb; do
    _EBB_COMPLETE=source_${shell%%:*} "$python" -c 'import sys; from ebbtide.cli.main import main; sys.argv[0] = "ebb"; main()' |
        sed '1{/^$/d}' >"$root/usr/share/${shell#*:}"
done
# Loaded when it is first asked, it answers at once.
echo '_ebb_completion "$@"' >>"$root/usr/share/zsh/vendor-completions/_ebb"
install -m 755 packaging/debian/preinst packaging/debian/postinst packaging/debian/prerm packaging/debian/postrm "$root/DEBIAN/"
install -d "$root/usr/share/doc/ebbtide"
git ls-files -z README.md CHANGELOG.md 'docs/*.md' 'docs/*.svg' 'docs/*.png' 'docs/openapi' deploy examples |
    xargs -0 cp --parents --target-directory "$root/usr/share/doc/ebbtide"
debian "$root" ebbtide "$(dpkg --print-architecture)" <<'EOF'
Depends: python3, python3.11, libvirt0 (>= 9.0), libc6 (>= 2.28), libgcc-s1, libstdc++6, systemd | systemd-standalone-sysusers | systemd-sysusers
Suggests: libvirt-daemon-system, qemu-system-x86, qemu-utils, postgresql
Description: deflate virtual machines instead of killing them
 The manager, which places VMs on hosts and deflates those of low priority
 where room is needed; the host agent, which takes CPU and memory from the VMs
 of a KVM host and gives them back; the command ebb. In a virtual environment
 of their own, for the Python of Debian 12.
EOF
deliver
