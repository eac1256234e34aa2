#!/usr/bin/env bash
# Writes requirements.lock and requirements-build.lock: what `make install` installs, with the hashes of its files, as the
# index has them that pip is set to. No address of an index gets into them. Run it with the Python of Debian 12, 3.11.
set -euo pipefail

cd "$(dirname "$0")/.."
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"${PYTHON3:-python3}" -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet --disable-pip-version-check 'pip-tools>=7.5'

compile() {
    "$place/venv/bin/pip-compile" --quiet --generate-hashes --allow-unsafe --strip-extras --no-header --no-annotate \
        --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --output-file "$@"
}

printf 'pip>=25.1\nsetuptools>=77\nwheel\n' >"$place/build.in"
compile requirements-build.lock "$place/build.in"
compile requirements.lock --extra host --extra postgresql --extra certificates --extra dask pyproject.toml
