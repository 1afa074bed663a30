# Makes a root folder with Debian's least, a C compiler, git and systemd, and builds the program in
# a clean checkout there.
#
#   sh empty_machine.sh reach
#   sh empty_machine.sh debian FOLDER
#   unshare --mount sh empty_machine.sh build FOLDER TOOLCHAIN CRATES COMMAND
#
# FOLDER has the `source`, and gets the root folder, `root`. TOOLCHAIN and CRATES are Rust's and
# cargo's of this machine, to be read only; COMMAND builds.
set -eu
stage=$1 folder=${2:-}
new=$folder/root

. /etc/os-release
server=$(apt-get indextargets --format '$(SITE)' 2> /dev/null | grep -m 1 '/debian$' || true)
server=${server:-http://deb.debian.org/debian}

case $stage in
reach)
    wget -q -t 3 -T 30 -O /dev/null "$server/dists/$VERSION_CODENAME/InRelease"
    ;;

debian)
    # Beside what the README asks for: systemd, and what the README and the page ask with.
    include=gcc,libc6-dev,git,ca-certificates,systemd,curl,iproute2
    echo "$ debootstrap --variant=minbase --include=$include $VERSION_CODENAME root $server"
    debootstrap --variant=minbase --include=$include "$VERSION_CODENAME" "$new" "$server" \
        > "$folder/debootstrap.log" 2>&1 || { tail -n 20 "$folder/debootstrap.log"; exit 1; }
    echo "Debian $(cat "$new/etc/debian_version"), $(find "$new/var/lib/dpkg/info" -name '*.list' | wc -l) packages"
    cp -r "$folder/source" "$new/srv/source"
    ln -sfn /srv/l7rp "$folder/checkout"
    ;;

build)
    toolchain=$3 crates=$4 command=$5
    mkdir -p "$new/opt/rust" "$new/opt/cargo/registry"
    mount --bind "$toolchain" "$new/opt/rust"
    mount -o remount,bind,ro "$new/opt/rust"
    mount --bind "$crates" "$new/opt/cargo/registry"
    mount -o remount,bind,ro "$new/opt/cargo/registry"
    mount -t proc proc "$new/proc"
    mount --bind /dev "$new/dev"
    inside() {
        echo "$ $1"
        chroot "$new" env -i HOME=/opt CARGO_HOME=/opt/cargo CARGO_NET_OFFLINE=true \
            PATH=/opt/rust/bin:/usr/sbin:/usr/bin:/sbin:/bin sh -euc "$1"
    }
    # Nothing that a build would find by luck.
    for program in make cmake pkg-config python3 clang rustup; do
        if chroot "$new" sh -c "command -v $program"; then echo "it is not empty"; exit 1; fi
    done
    inside "cargo --version; gcc --version | head -n 1; git --version"
    if [ -e "$new/srv/source/HEAD" ]; then
        inside "git clone /srv/source /srv/l7rp"
    else
        inside "cp -r /srv/source /srv/l7rp"
    fi
    inside "cd /srv/l7rp; $command"
    inside "/srv/l7rp/l7rp --version"
    ;;
esac
