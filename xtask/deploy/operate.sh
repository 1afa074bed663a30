# Does what docs/src/operating/systemd.md tells, as it is written there, and looks whether it
# comes true. A line `#@ SECTION` stands for the commands of that section of the page. Run as root
# under the systemd of boot.sh, in /check, where `checkout` has what the commands expect.
set -euE
cd /check/checkout

fail() {
    echo "FAILED: $*"
    systemctl status l7rp --no-pager || true
    journalctl -n 60 --no-pager -o cat || true
    exit 1
}

trap 'trap - ERR; { set +x; } 2> /dev/null; fail "the command on line $LINENO"' ERR

# Until the command succeeds, or it is long over.
eventually() {
    for _ in $(seq 150); do
        if "$@" > /dev/null 2>&1; then return 0; fi
        sleep 0.2
    done
    fail "never true: $*"
}

property() { systemctl show -P "$1" l7rp; }
events() { journalctl -u l7rp -o cat --no-pager | grep -c "\"event\":\"$1\"" || true; }

# Asks without a pause until told to stop; each request that fails is a line.
begin_load() {
    : > /check/failures
    : > /check/loading
    while [ -e /check/loading ]; do
        curl -sS -f -o /dev/null --max-time 20 http://localhost/ 2>> /check/failures || true
        echo >> /check/requests
    done &
    load=$!
}
end_load() {
    rm /check/loading
    wait "$load"
    if [ -s /check/failures ]; then fail "requests were lost: $(head -n 3 /check/failures)"; fi
    echo "$(wc -l < /check/requests) requests, none lost"
}

# The application at port 3000.
"$PWD/target/release/l7rp" backend --listen 127.0.0.1:3000 --name app > /check/app.log 2>&1 &

# Sooner than the unit says, so that there is something to see.
mkdir -p /run/systemd/system/l7rp.service.d
printf '[Service]\nWatchdogSec=10s\n' > /run/systemd/system/l7rp.service.d/check.conf

echo "=== Install"
#@ Install
test "$(property ActiveState)/$(property SubState)" = active/running || fail "it does not run"
curl -fsS http://localhost/ | grep -q '^app request=' || fail "the application does not answer"
test "$(stat -c %U:%a /var/lib/l7rp)" = l7rp:700 || fail "no state directory"

echo "=== As the unit says"
main=$(property MainPID)
test "$(stat -c %U "/proc/$main")" = l7rp || fail "it does not run as l7rp"
grep -q '^CapEff:[[:space:]]*0000000000000400$' "/proc/$main/status" || fail "it has other capabilities"
grep -q '^NoNewPrivs:[[:space:]]*1$' "/proc/$main/status" || fail "it may gain privileges"
grep -q '^Seccomp:[[:space:]]*2$' "/proc/$main/status" || fail "its system calls are not filtered"
for place in /etc/l7rp /usr /var/lib/other; do
    mkdir -p $place
    chmod o+w $place
    if nsenter --mount --target "$main" setpriv --reuid l7rp --regid l7rp --clear-groups \
        touch $place/x 2> /dev/null; then fail "it may write to $place"; fi
    chmod o-w $place
done
nsenter --mount --target "$main" setpriv --reuid l7rp --regid l7rp --clear-groups \
    touch /var/lib/l7rp/x /run/l7rp/x || fail "it may not write where it should"

echo "=== Change the configuration"
begin_load
sed -i 's/timeout: 30s/timeout: 20s/' /etc/l7rp/config.yaml
#@ Change the configuration
is_reloaded() { test "$(events config_reloaded)" -ge 1; }
eventually is_reloaded
curl -fsS http://127.0.0.1:9090/-/plan | grep -q 20 || fail "the new file is not in force"
cp /etc/l7rp/config.yaml /check/good.yaml
echo 'routse: []' >> /etc/l7rp/config.yaml
if systemctl reload l7rp; then fail "a wrong file was taken for a good one"; fi
journalctl -u l7rp -o cat --no-pager | grep -q routse || fail "the journal does not say what is wrong"
test "$(property ActiveState)" = active || fail "a wrong file has ended it"
cat /check/good.yaml > /etc/l7rp/config.yaml

echo "=== Another binary"
#@ Another binary
is_other() { test "$(property MainPID)" != "$main" && test "$(property MainPID)" != 0; }
eventually is_other
is_gone() { ! test -e "/proc/$main"; }
eventually is_gone
end_load
test "$(property NRestarts)" = 0 || fail "it was started again instead"
test "$(property ActiveState)/$(property SubState)" = active/running || fail "the new one does not run"
main=$(property MainPID)
grep -q '^CapEff:[[:space:]]*0000000000000400$' "/proc/$main/status" || fail "the new one has other capabilities"
systemctl reload l7rp || fail "the new one does not reload"
# It is watched in its turn.
seen=$(property WatchdogTimestampMonotonic)
is_alive() { test "$(property WatchdogTimestampMonotonic)" != "$seen"; }
eventually is_alive

echo "=== A stuck process is started again"
kill -STOP "$(property MainPID)"
again() { test "$(property NRestarts)" -ge 1; }
eventually again
eventually curl -fsS http://localhost/

echo "=== A wrong configuration is not tried again and again"
echo 'routse: []' >> /etc/l7rp/config.yaml
if systemctl restart l7rp; then fail "it starts with a wrong file"; fi
test "$(property ActiveState)/$(property ExecMainStatus)" = failed/2 || fail "it is started again"
cat /check/good.yaml > /etc/l7rp/config.yaml
systemctl start l7rp

echo "=== Connections that wait while it starts again"
#@ Connections that wait while it starts again
printf '[Service]\nAmbientCapabilities=\nCapabilityBoundingSet=\nPrivateUsers=yes\n' \
    > /run/systemd/system/l7rp.service.d/check.conf
systemctl daemon-reload
begin_load
systemctl restart l7rp
systemctl restart l7rp
grep -q '^CapEff:[[:space:]]*0000000000000000$' "/proc/$(property MainPID)/status" || fail "it has capabilities"
main=$(property MainPID)
systemctl kill --kill-whom=main --signal=SIGUSR2 l7rp
eventually is_other
eventually is_gone
end_load
test "$(events sockets_unused)" = 0 || fail "the socket is not the listener's"
rm -r /run/systemd/system/l7rp.service.d
systemctl daemon-reload

echo "=== Stop"
systemctl stop l7rp
test "$(property Result)/$(property ExecMainStatus)" = success/0 || fail "it did not end in order"
systemctl start l7rp

echo "=== Remove"
#@ Remove
if curl -s -o /dev/null http://localhost/; then fail "somebody still answers"; fi
for left in /etc/systemd/system/l7rp* /etc/l7rp /var/lib/l7rp /usr/local/bin/l7rp; do
    if [ -e "$left" ]; then fail "$left is left"; fi
done
echo "=== All is well"
