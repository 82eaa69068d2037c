#!/bin/sh
# Make a virtual environment: `venv.sh DIR`. Called by `make setup`; PYTHON names the interpreter to use.
# Takes the first Python >= 3.11 that can make one, and says what to install where there is none.
set -eu
dir=$1

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

found=
for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
    command -v "$python" >/dev/null 2>&1 && new_enough "$python" || continue
    found=${found:-$python}
    # Debian has the venv module without ensurepip unless python3-venv is installed.
    "$python" -c 'import ensurepip, venv' 2>/dev/null || continue
    "$python" -m venv "$dir" && exit 0
    rm -rf "$dir"
done

if [ -z "$found" ]; then
    tried=${PYTHON:-python3}
    echo "ROCmForge needs Python 3.11 or newer; $tried is $( ("$tried" -V) 2>/dev/null || echo not there)." >&2
    echo "Install one (Debian 12, Ubuntu 24.04: apt install python3 python3-venv; Fedora: dnf install python3.12)," >&2
    echo "or say where it is: make setup PYTHON=/path/to/python3.12" >&2
    exit 1
fi

# Two other tools that make the same thing, where somebody has them.
if "$found" -m virtualenv --version >/dev/null 2>&1; then
    exec "$found" -m virtualenv --quiet "$dir"
fi
if command -v uv >/dev/null 2>&1; then
    exec uv venv --quiet --seed --python "$(command -v "$found")" "$dir"
fi
version=$("$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
echo "$found (Python $version) cannot make a virtual environment: its venv module is missing or broken." >&2
echo "Install it (Debian, Ubuntu: apt install python3-venv, or python$version-venv for an added Python)," >&2
echo "or say which Python to use: make setup PYTHON=/path/to/python3.12" >&2
exit 1
