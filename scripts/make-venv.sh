#!/usr/bin/env bash
# Makes the virtual environment $1 with Ebbtide (editable) in it, and for the purposes `test` and `docs` their tools.
set -euo pipefail

venv=$1
purpose=${2:-demo}
cd "$(dirname "$0")/.."

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

if [ ! -x "$venv/bin/python" ]; then
    python=
    for candidate in "${PYTHON3:-python3}" python3.13 python3.12 python3.11 /usr/bin/python3; do
        if usable "$candidate"; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "make-venv: no Python of version 3.11 or newer with the module venv was found; name one by PYTHON3=" >&2
        exit 1
    fi
    "$python" -m venv "$venv"
fi

python=$venv/bin/python
install() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }

if [ "$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")')" = 3.11 ]; then
    # Files of these hashes and no others (scripts/lock.sh): what builds first, then what is built with it.
    install --require-hashes --requirement requirements-build.lock
    install --require-hashes --no-build-isolation --requirement requirements.lock
    # Twice quiet: not what setuptools thinks of editable installs.
    install --quiet --no-deps --no-build-isolation --editable '.[host]'
else
    echo "make-venv: requirements.lock is for Python 3.11: installing what the index offers, without hashes" >&2
    # Old pips know no dependency groups.
    install --upgrade "pip>=25.1"
    # For scripts/packages.sh, which builds with what is here.
    install setuptools
    install --editable '.[host]'
fi
# Tools of development are not pinned.
case $purpose in
    test)
        install --group dev
        # What programs make Python clients with: an environment of its own, since it wants an older typer than `ebb`.
        "$python" -m venv "$venv/openapi"
        "$venv/openapi/bin/python" -m pip install --quiet --disable-pip-version-check openapi-python-client==0.29.1
        # Generators of TypeScript, and axe-core, by the hashes in their locks; nothing of theirs is run here.
        for pair in tests/clients/typescript:npm tests/browser:npm-browser; do
            place=$venv/${pair#*:}
            mkdir -p "$place"
            cp "${pair%:*}/package.json" "${pair%:*}/package-lock.json" "$place"
            npm ci --prefix "$place" --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null
        done
        ;;
    docs) install --group docs ;;
esac
