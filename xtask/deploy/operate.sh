# Does what docs/src/operating/systemd.md tells, as it is written there, and looks whether it
# comes true. A line `#@ SECTION` stands for the commands of that section of the page. Run after
# words.sh, under the systemd of boot.sh; `checkout` has what the commands expect.

last_words() {
    systemctl status l7rp --no-pager --lines 0 || true
    told
}
# The journal without all the requests.
told() { journalctl -n 20000 --no-pager -o cat "$@" | grep -v request_completed | tail -n 40; }
state() { echo "$(property ActiveState) ($(property SubState))"; }
property() { systemctl show -P "$1" l7rp; }
events() { journalctl -u l7rp -o cat --no-pager | grep -c "\"event\":\"$1\"" || true; }

# Sooner than the unit says, so that there is something to see.
mkdir -p /run/systemd/system/l7rp.service.d
printf '[Service]\nWatchdogSec=10s\n' > /run/systemd/system/l7rp.service.d/check.conf

before_installation

section "Install"
#@ Install
shows '^active (running)$' state
shows '^app request=' curl -fsS http://localhost/
test "$(stat -c %U:%a /var/lib/l7rp)" = l7rp:700 || fail "no state directory"

section "As the unit says"
main=$(property MainPID)
test "$(stat -c %U "/proc/$main")" = l7rp || fail "it does not run as l7rp"
grep -q '^CapEff:[[:space:]]*0000000000000400$' "/proc/$main/status" || fail "it has other capabilities"
grep -q '^NoNewPrivs:[[:space:]]*1$' "/proc/$main/status" || fail "it may gain privileges"
shows_its_limits "$main"
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
rmdir /var/lib/other
echo "User, capabilities, system calls, and where it may write: as the unit says."

section "Change the configuration"
begin_load
does sed -i 's/127.0.0.1:3000/127.0.0.1:3001/' /etc/l7rp/config.yaml
#@ Change the configuration
is_reloaded() { test "$(events config_reloaded)" -ge 1; }
eventually is_reloaded
shows '^other request=' curl -fsS http://localhost/
test "$(property MainPID)" = "$main" || fail "it was started again instead"
cp /etc/l7rp/config.yaml /check/good.yaml
does break_the_configuration
refuses . systemctl reload l7rp
shows routse told -u l7rp
shows '^active (running)$' state
shows '^other request=' curl -fsS http://localhost/
cat /check/good.yaml > /etc/l7rp/config.yaml

section "Another binary"
another_binary
#@ Another binary
is_other() { test "$(property MainPID)" != "$main" && test "$(property MainPID)" != 0; }
eventually is_other
is_gone() { ! test -e "/proc/$main"; }
eventually is_gone
end_load
test "$(property NRestarts)" = 0 || fail "it was started again instead"
shows '^active (running)$' state
main=$(property MainPID)
is_the_new_file "$main" || fail "it is the old binary that runs"
shows '^other request=' curl -fsS http://localhost/
grep -q '^CapEff:[[:space:]]*0000000000000400$' "/proc/$main/status" || fail "the new one has other capabilities"
systemctl reload l7rp || fail "the new one does not reload"
# It is watched in its turn.
seen=$(property WatchdogTimestampMonotonic)
is_alive() { test "$(property WatchdogTimestampMonotonic)" != "$seen"; }
eventually is_alive

section "A stuck process is started again"
does kill -STOP "$(property MainPID)"
again() { test "$(property NRestarts)" -ge 1; }
eventually again
eventually curl -fsS http://localhost/
shows '^other request=' curl -fsS http://localhost/

section "A wrong configuration is not tried again and again"
does break_the_configuration
refuses . systemctl restart l7rp
test "$(property ExecMainStatus)" = 2 || fail "it did not say that the file is wrong"
shows '^failed (failed)$' state
cat /check/good.yaml > /etc/l7rp/config.yaml
does systemctl start l7rp
shows '^other request=' curl -fsS http://localhost/

section "Connections that wait while it starts again"
#@ Connections that wait while it starts again
printf '[Service]\nAmbientCapabilities=\nCapabilityBoundingSet=\nPrivateUsers=yes\n' \
    > /run/systemd/system/l7rp.service.d/check.conf
systemctl daemon-reload
begin_load
does systemctl restart l7rp
does systemctl restart l7rp
grep -q '^CapEff:[[:space:]]*0000000000000000$' "/proc/$(property MainPID)/status" || fail "it has capabilities"
main=$(property MainPID)
does systemctl kill --kill-whom=main --signal=SIGUSR2 l7rp
eventually is_other
eventually is_gone
end_load
test "$(events sockets_unused)" = 0 || fail "the socket is not the listener's"
rm -r /run/systemd/system/l7rp.service.d
systemctl daemon-reload

section "Stop"
# Of a process that has taken over from another one, too, whoever is being answered gets the end.
curl -fsS --max-time 20 "http://localhost/slow?ms=2000" > /check/slow 2>&1 & slow=$!
is_asked() { curl -fsS http://localhost:9090/status | grep -q '"in_flight": *[1-9]'; }
eventually is_asked
does systemctl stop l7rp
wait "$slow" || fail "a request was cut: $(cat /check/slow)"
grep -q '^waited 2000 ms' /check/slow || fail "another answer: $(cat /check/slow)"
test "$(property Result)/$(property ExecMainStatus)" = success/0 || fail "it did not end in order"
does systemctl start l7rp

section "Remove"
#@ Remove
nothing_is_left
section "All is well"
