# What the stories are told with. Run by bash as root, in /check of a machine apart.
set -euE
cd /check/checkout
PS4='$ '
began=$(date +%s)

# A terminal would not show how far it is.
printf 'silent\nshow-error\n' > /check/.curlrc
export CURL_HOME=/check

section() { echo && echo "=== $* ($(($(date +%s) - began)) s)"; }

fail() {
    echo "FAILED: $*"
    last_words || true
    exit 1
}

trap 'trap - ERR; { set +x; } 2> /dev/null; fail "the command on line $LINENO"' ERR

# Shows a command and does it.
does() { echo "\$ $*" && "$@"; }

# Shows a command and its answer, of which a line must match the pattern.
shows() {
    local pattern=$1 answer code=0
    shift
    echo "\$ $*"
    answer=$("$@" 2>&1) || code=$?
    echo "$answer"
    if [ $code != 0 ]; then fail "exit code $code"; fi
    grep -q -e "$pattern" <<< "$answer" || fail "no line matches $pattern"
}

# Shows a command that must fail, and say something that matches the pattern.
refuses() {
    local pattern=$1 answer
    shift
    echo "\$ $*"
    if answer=$("$@" 2>&1); then fail "it succeeds: $answer"; fi
    echo "$answer"
    grep -q -e "$pattern" <<< "$answer" || fail "no line matches $pattern"
}

# Until the command succeeds, or it is long over.
eventually() {
    for _ in $(seq 150); do
        if "$@" > /dev/null 2>&1; then return 0; fi
        sleep 0.2
    done
    fail "never true: $*"
}

# Asks without a pause until told to stop, by new connections and by some that are kept; each
# request that fails is a line.
begin_load() {
    echo "From here on there is load."
    : > /check/failures
    : > /check/requests
    : > /check/loading
    loads=()
    for _ in 1 2 3; do
        while [ -e /check/loading ]; do
            curl -sS -f -o /dev/null --max-time 20 http://localhost/ 2>> /check/failures || true
            echo >> /check/requests
        done &
        loads+=($!)
    done
    "$PWD/target/release/l7rp" load --concurrency 8 --rate 200 --duration 10m http://127.0.0.1/ \
        > /check/load 2>&1 &
    kept=$!
    are_asked() { test "$(wc -l < /check/requests)" -ge 20; }
    eventually are_asked
}
end_load() {
    # What has changed last is asked, too.
    cp /check/requests /check/requests.before
    are_asked_again() {
        test "$(wc -l < /check/requests)" -ge $(($(wc -l < /check/requests.before) + 20))
    }
    eventually are_asked_again
    rm /check/loading
    wait "${loads[@]}"
    kill -INT $kept || true
    wait $kept || fail "the load ends with code $?: $(cat /check/load)"
    if [ -s /check/failures ]; then fail "requests were lost: $(head -n 3 /check/failures)"; fi
    echo "$(wc -l < /check/requests) requests by connections of their own, none lost; by 8 that are kept:"
    shows '^failed  *none$' head -n 11 /check/load
    grep -q '^statuses  *200: [0-9]*$' /check/load || fail "not all were answered with 200"
}

# What becomes of a limit where the machine has a lower one of its own: that.
closest() { (ulimit "-$1" "$2" 2> /dev/null || true; ulimit "-H$1"); }
shows_its_limits() {
    local files
    files=$(closest n 1048576)
    shows "^Max open files  *$files  *$files " grep -e 'open files' -e core "/proc/$1/limits"
    grep -q '^Max core file size  *0  *0 ' "/proc/$1/limits" || fail "it may leave a core"
}

# All that an installation could leave. What the tools for users keep as backups is not ours.
places() {
    local where=(/etc /usr/local /var/lib)
    # On an empty machine there is nobody else who writes.
    if [ -e /srv/l7rp ]; then where=(/etc /home /opt /root /srv /usr /var /run); fi
    find "${where[@]}" ! -type s \
        \( -path '/run/*/*' -o -path '/var/lib/*/*' -o -path /var/log -o -path /var/cache \) -prune \
        -o ! -path '/etc/*-' ! -path /etc/.pwd.lock -print | sort
    getent passwd
    getent group
}
before_installation() { places > /check/places; }
nothing_is_left() {
    refuses 'connect to' curl -sS http://localhost/
    places > /check/places.after
    diff /check/places /check/places.after || fail "something is left, or gone"
    echo "no file, user or group is left"
}

break_the_configuration() { echo 'routse: []' >> /etc/l7rp/config.yaml; }

# Two applications: the one at port 3000 of the first configuration, and another.
"$PWD/target/release/l7rp" backend --listen 127.0.0.1:3000 --name app > /check/app.log 2>&1 &
"$PWD/target/release/l7rp" backend --listen 127.0.0.1:3001 --name other > /check/other.log 2>&1 &
# What `Another binary` installs differs from what `Install` did.
another_binary() {
    cp target/release/l7rp /check/other
    echo another >> /check/other
    mv /check/other target/release/l7rp
}
is_the_new_file() { cmp -s "/proc/$1/exe" target/release/l7rp; }
