# Makes a root folder with Debian's least, a C compiler, git and systemd, and builds the program in
# a clean checkout there. To be run in a mount namespace of its own: with it end the mounts.
#
#   unshare --mount sh empty_machine.sh FOLDER TOOLCHAIN CRATES BUILD
#
# FOLDER has the checkout, `source`, and gets the root folder, `root`. TOOLCHAIN and CRATES are Rust's and cargo's of this machine; BUILD is the command.
set -eu
folder=$1 toolchain=$2 crates=$3 build=$4
new=$folder/root

. /etc/os-release
server=$(apt-get indextargets --format '$(SITE)' 2> /dev/null | grep -m 1 '/debian$' || true)
rm -rf --one-file-system "$new"
# Beside what the README asks for: systemd, and curl to ask with.
debootstrap --variant=minbase --include=gcc,libc6-dev,git,ca-certificates,systemd,curl,iproute2 \
    "$VERSION_CODENAME" "$new" "${server:-http://deb.debian.org/debian}" > "$folder/debootstrap.log" 2>&1 ||
    { tail -n 20 "$folder/debootstrap.log"; exit 1; }

cp -r "$folder/source" "$new/srv/l7rp"
ln -sfn /srv/l7rp "$folder/checkout"
mkdir -p "$new/opt/rust" "$new/opt/cargo/registry"
mount --bind "$toolchain" "$new/opt/rust"
mount -o remount,bind,ro "$new/opt/rust"
mount --bind "$crates" "$new/opt/cargo/registry"
mount -o remount,bind,ro "$new/opt/cargo/registry"
mount -t proc proc "$new/proc"
mount --bind /dev "$new/dev"

echo "+ $build"
chroot "$new" env -i HOME=/opt CARGO_HOME=/opt/cargo CARGO_NET_OFFLINE=true \
    PATH=/opt/rust/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    sh -euc "cd /srv/l7rp && $build"
