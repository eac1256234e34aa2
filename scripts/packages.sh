#!/usr/bin/env bash
# Builds into dist/, or $2: wheel and sdist of ebbtide; for guests a wheel, one file (ebb-guestagent.pyz) and a Debian package.
# $1: the Python that builds, which has setuptools. No network is needed.
set -euo pipefail

python=$(realpath -s "$1")
dist=$(realpath -m "${2:-$(dirname "$0")/../dist}")
cd "$(dirname "$0")/.."
version=$("$python" -c 'import guestagent; print(guestagent.__version__)')
# The same commit makes the same files.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
export SOURCE_DATE_EPOCH
rm -rf "$dist"
mkdir -p "$dist"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
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

root=$work/deb
install -d "$root/DEBIAN" "$root/usr/lib/ebbtide-guest" "$root/usr/bin" "$root/lib/systemd/system" \
    "$root/etc/ebbtide/adapters.d" "$root/etc/ebbtide/preempt.d"
cp -r "$work/guest/guestagent" "$work/guest/app_adapters" "$root/usr/lib/ebbtide-guest/"
for program in ebb-guestagent:guestagent ebb-adapter:app_adapters; do
    printf '#!/usr/bin/python3\nimport sys\n\nsys.path.insert(0, "/usr/lib/ebbtide-guest")\n\nfrom %s.main import main\n\nsys.exit(main())\n' \
        "${program#*:}" >"$root/usr/bin/${program%:*}"
done
install -m 644 packaging/systemd/ebb-guestagent.service "$root/lib/systemd/system/"
install -m 755 packaging/guest/postinst packaging/guest/prerm "$root/DEBIAN/"
cat >"$root/DEBIAN/control" <<EOF
Package: ebbtide-guest
Version: $version
Architecture: all
Depends: python3 (>= 3.8)
Maintainer: Ebbtide maintainers <maintainers@ebbtide.invalid>
Section: admin
Priority: optional
Description: Ebbtide inside a guest
 The guest agent tells the host which CPUs and how much memory the guest can spare, takes CPUs off and on line, and
 relays requests to the applications; ebb-adapter makes memcached, Redis, PostgreSQL, a JVM, Spark or a web server one
 of them.
EOF
chmod -R u=rwX,go=rX "$root"
chmod 755 "$root"/usr/bin/* "$root"/DEBIAN/p*
find "$root" -exec touch --date "@$SOURCE_DATE_EPOCH" {} +
dpkg-deb --root-owner-group --build "$root" "$dist" >/dev/null
wheel "$work/guest"
ls -l "$dist" | awk 'NR > 1 { print $5, $9 }'
