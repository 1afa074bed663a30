# Runs the program of an image as a container would: its own root folder with the image's files and
# what an engine adds (names, the configuration that is mounted), a user that is only a number, the
# first process of its own, in a network with only loopback.
#
#   container.sh IMAGE FOLDER USER STOPSIGNAL
#
# FOLDER has `command` and `check`: the words of what starts it, and of what looks after it.
set -eu
image=$1 folder=$2 user=$3 signal=$4
root=$folder/root
main=

fail() {
    echo "FAILED: $*"
    cat "$folder/log" 2> /dev/null || true
    exit 1
}
eventually() {
    for _ in $(seq 150); do
        if "$@" > /dev/null 2>&1; then return 0; fi
        sleep 0.2
    done
    fail "never true: $*"
}

ip link set lo up
mkdir -p "$root"
mount -t tmpfs -o mode=755 tmpfs "$root"
cp -r "$image/." "$root"
echo '127.0.0.1 app.test' > "$root/etc/hosts"
mkdir "$root/etc/l7rp"
cat > "$root/etc/l7rp/config.yaml" << 'END'
listeners: [{ name: http, bind: "0.0.0.0:8080" }]
upstream_pools:
  - { name: app, upstreams: [{ url: "http://app.test:3000" }] }
  - { name: other, upstreams: [{ url: "https://app.test:3001" }] }
routes:
  - { name: app, pool: app }
  - { name: other, path_prefix: /other, pool: other }
END
mount -o remount,ro "$root"
echo "The root folder:"
(cd "$root" && find . -type f -exec ls -ln {} +)

"$root/usr/bin/l7rp" backend --listen 127.0.0.1:3000 --name app > "$folder/app.log" 2>&1 &

inside() { chroot --userspec="$user" "$root" "$@"; }
if inside $(cat "$folder/check"); then fail "it is well before it runs"; fi
# The first process of its own: what has no handler of a signal there is not ended by it.
unshare --pid --fork --kill-child chroot --userspec="$user" "$root" $(cat "$folder/command") \
    > "$folder/log" 2>&1 &
parent=$!
eventually inside $(cat "$folder/check")
inside $(cat "$folder/check") || fail "the check says no"
main=$(cat "/proc/$parent/task/$parent/children")
main=${main% }
grep -q "^Uid:[[:space:]]*${user%:*}[[:space:]]" "/proc/$main/status" || fail "it is another user"
eventually inside /usr/bin/l7rp healthcheck --ready
answer=$(curl -fsS http://127.0.0.1:8080/) || fail "no answer"
echo "$answer" | grep -q '^app request=' || fail "not the application's answer: $answer"
kill -s "${signal#SIG}" "$main"
wait "$parent" || fail "stopped by $signal it exits with $?"
if inside $(cat "$folder/check"); then fail "it is well after its end"; fi
echo "It ran as $user with nothing else around it, looked up a name, answered, and ended in order."
