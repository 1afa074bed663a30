# Boots systemd on a copy-on-write view of a root folder, in namespaces of its own, and runs a
# script there as a service. Nothing of it is left afterwards: mounts, processes, sockets and
# written files end with the namespaces, and the machine's own systemd, if any, knows nothing.
#
#   sh boot.sh outside ROOT FOLDER SECONDS
#
# FOLDER is /check inside, and has the script; its output goes to FOLDER/output, its exit code to
# FOLDER/code. Inside there is no network but loopback.
set -eu
stage=$1 root=$2 folder=$3 seconds=$4

case $stage in
outside)
    rm -f "$folder/code" "$folder/output"
    mkdir -p "$folder/view"
    exec unshare --mount sh "$0" cgroup "$root" "$folder" "$seconds"
    ;;

cgroup)
    mount -t tmpfs tmpfs "$folder/view"
    cd "$folder/view"
    mkdir cgroup upper work root
    mount -t cgroup2 cgroup2 cgroup
    above=$PWD/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)
    own=$above/l7rp-check-$$
    mkdir "$own"
    # systemd must not meet processes that are not its own: only it goes there.
    sh -c 'echo $$ > "$1/cgroup.procs"; shift; exec unshare --pid --fork --kill-child --mount \
        --net --uts --ipc --cgroup sh "$@"' sh "$own" "$0" inside "$root" "$folder" "$seconds" \
        > "$folder/systemd.log" 2>&1 < /dev/null &
    child=$!
    while [ ! -s "$folder/code" ] && [ "$seconds" -gt 0 ] && kill -0 $child 2> /dev/null; do
        sleep 1
        seconds=$((seconds - 1))
    done
    kill -KILL $child 2> /dev/null || true
    wait $child 2> /dev/null || true
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        find "$own" -depth -type d -exec rmdir {} + 2> /dev/null && break
        sleep 1
    done
    cat "$folder/output" 2> /dev/null || true
    if [ -s "$folder/code" ]; then
        exit "$(cat "$folder/code")"
    fi
    echo "systemd did not come to the end of the script; its last words:"
    tail -n 20 "$folder/systemd.log"
    exit 1
    ;;

inside)
    cd "$folder/view"
    mount -t overlay overlay -o "lowerdir=$root,upperdir=upper,workdir=work" root
    mkdir -p root/check root/proc root/sys root/dev root/run root/tmp
    mount --bind "$folder" root/check
    mount -t proc proc root/proc
    # As in any container: what belongs to the machine is only looked at.
    mount --bind root/proc/sys root/proc/sys
    mount -o remount,bind,ro root/proc/sys
    mount -t sysfs -o ro sysfs root/sys
    mount -t cgroup2 cgroup2 root/sys/fs/cgroup
    mount -t tmpfs -o mode=755 tmpfs root/run
    mount -t tmpfs -o mode=1777 tmpfs root/tmp
    mount -t tmpfs -o mode=755 tmpfs root/dev
    for device in null zero full random urandom tty; do
        : > root/dev/$device
        mount --bind /dev/$device root/dev/$device
    done
    mkdir root/dev/shm root/dev/pts
    mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts root/dev/pts
    ln -s pts/ptmx root/dev/ptmx
    mount -t tmpfs -o mode=1777 tmpfs root/dev/shm
    ln -s /proc/self/fd root/dev/fd
    hostname l7rp-check
    cd root
    # Not the machine's own services, and not the tasks of a first boot.
    rm -rf etc/systemd/system
    mkdir -p etc/systemd/system run/systemd/journald.conf.d
    tr -d - < /proc/sys/kernel/random/uuid > etc/machine-id
    printf '[Journal]\nStorage=volatile\n' > run/systemd/journald.conf.d/check.conf
    for unit in systemd-networkd-wait-online NetworkManager-wait-online; do
        ln -s /dev/null etc/systemd/system/$unit.service
    done
    cat > etc/systemd/system/check.service << 'END'
[Unit]
After=basic.target
Wants=basic.target
[Service]
Type=oneshot
WorkingDirectory=/check
ExecStart=/bin/sh -c 'ip link set lo up 2> /check/output; bash /check/script > /check/output 2>&1; echo $$? > /check/code'
END
    printf '[Unit]\nWants=check.service\n' > etc/systemd/system/check.target
    mkdir .before
    pivot_root . .before
    umount -l /.before
    exec env -i container=l7rp-check PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        /lib/systemd/systemd --unit=check.target --log-target=journal --show-status=no
    ;;
esac
