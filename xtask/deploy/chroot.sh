# Runs a script in a root folder, in namespaces of its own but without systemd. What is mounted
# and what runs ends with the namespaces; what is written to the root folder stays.
#
#   unshare --mount --pid --fork --kill-child --net sh chroot.sh ROOT FOLDER
#
# FOLDER is /check inside, and has the script. Inside there is no network but loopback.
set -eu
root=$1 folder=$2

ip link set lo up
mkdir -p "$root/check"
mount --bind "$folder" "$root/check"
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
# The first process, so that it reaps what the proxy leaves to it.
exec chroot "$root" env -i HOME=/root \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin bash /check/script 2>&1
