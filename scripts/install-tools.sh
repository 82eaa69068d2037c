#!/usr/bin/env bash
# Install what of scripts/tools.txt is missing: packages of Debian (as root), the rest below build/. Says what is still
# missing, and ends with 1 then for root, who could have installed all of it. Called by .ci/run, `make tools` and
# `make test INSTALL=1`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export DEBIAN_FRONTEND=noninteractive PIP_DEFAULT_TIMEOUT=60
[ -d /usr/local/go/bin ] && PATH=$PATH:/usr/local/go/bin
export PATH=$PWD/build/bin:$PATH

# A network that fails for a moment is not the project's fault: everything that is fetched is tried three times.
again() {
    local attempt
    for attempt in 1 2 3; do
        "$@" && return
        echo "attempt $attempt of 3 failed: $*" >&2
        [ "$attempt" = 3 ] || sleep $((attempt * 5))
    done
    return 1
}
within() { timeout --foreground --kill-after 30 "$@"; }

found() { # KIND WHAT
    case $1 in
        program) command -v "$2" >/dev/null 2>&1 ;;
        module) python3 -c "import $2" 2>/dev/null ;;
        uid) [ "$(id -u)" = "$2" ] ;;
        file) compgen -G "$2" >/dev/null ;;
        *) echo "scripts/tools.txt: $1: no such way to find a tool" >&2 && exit 2 ;;
    esac
}
# Call COMMAND NAME SOURCE... for each tool that is missing and comes by KIND.
missing() {
    local name find come
    while IFS='|' read -r name find come; do
        case $name in '' | '#'*) continue ;; esac
        read -ra find <<<"$find"
        read -ra come <<<"$come"
        if [ "${come[0]}" = "$1" ] && ! found "${find[@]}"; then "${@:2}" $name "${come[@]:1}" </dev/null; fi
    done <scripts/tools.txt
}

packages=()
package() { packages+=("$2"); }
apt_install() {
    # Another apt that is at work is waited for.
    local patient=(-qq -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300)
    within 900 apt-get "${patient[@]}" update &&
        within 1800 apt-get "${patient[@]}" install -y --no-install-recommends ca-certificates "${packages[@]}" >/dev/null
}
go_install() { # NAME MODULE VERSION [VERSION-OF-OLD-GO]
    local version=$3 log=build/$1.log
    case $(go env GOVERSION) in go1.1[0-9]* | go1.20*) version=${4:-$3} ;; esac
    echo "$1 $version"
    mkdir -p build/bin
    again within 900 env GOBIN="$PWD/build/bin" go install "$2@$version" >"$log" 2>&1 || { cat "$log" && return 1; }
}
make_target() { again within 1800 make "$2"; }

missing apt package
if [ ${#packages[@]} -gt 0 ]; then
    if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
        echo "installing: ${packages[*]}"
        again apt_install
    else
        echo "missing, and this is not root on Debian: apt install ${packages[*]}" >&2
    fi
fi
again within 1800 make setup
if command -v go >/dev/null 2>&1; then missing go go_install; fi
missing make make_target
# CuPy for ROCm, and under it a runtime that needs no GPU.
if command -v "${CXX:-g++}" >/dev/null 2>&1; then again within 1800 .venv/bin/python -m tests.simulators.rocm.standin >build/standin.log; fi

absent=()
absent() { absent+=("$1"); }
for kind in apt go make; do missing $kind absent; done
if [ ${#absent[@]} -gt 0 ]; then
    echo "still missing: ${absent[*]}" >&2
    # Who is not root has been told what to install, and may do without.
    [ "$(id -u)" != 0 ]
fi
