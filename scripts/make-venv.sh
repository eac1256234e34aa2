#!/usr/bin/env bash
# Makes the virtual environment $1 with Ebbtide (editable) and its development tools in it.
set -euo pipefail

venv=$1
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

# Old pips know no dependency groups.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable . --group dev
