# The installation where systemd does not run: the commands of docs/src/operating/systemd.md with
# a `systemctl` that does by hand what the unit says, as its user and with its limits. Run after
# words.sh, in chroot.sh; a line `#@ SECTION` stands for the commands of that section of the page.

last_words() { grep -v request_completed /check/journal | tail -n 40; }

setting() { sed -n "s/^$1=//p" /etc/systemd/system/l7rp.service; }

# Runs a program as the unit has it run. Not as hardened: that is for systemd.
as_the_unit_says() {
    local capabilities
    capabilities=$(setting AmbientCapabilities | sed 's/CAP_//' | tr '[:upper:]' '[:lower:]')
    ulimit -c "$(setting LimitCORE)"
    ulimit -n "$(closest n "$(setting LimitNOFILE)")"
    umask "$(setting UMask)"
    exec setpriv --reuid "$(setting User)" --regid "$(setting Group)" --init-groups --no-new-privs \
        --bounding-set "-all,+$capabilities" --inh-caps "-all,+$capabilities" \
        --ambient-caps "-all,+$capabilities" "$@"
}

# The process that runs the binary which is installed now.
main_process() {
    local process
    for process in /proc/[0-9]*; do
        if [ "$(readlink "$process/exe")" = /usr/local/bin/l7rp ]; then
            echo "${process#/proc/}"
            return
        fi
    done
    return 1
}

start() {
    local owner command
    owner="-o $(setting User) -g $(setting Group)"
    # shellcheck disable=SC2086 # words
    install -d -m "$(setting StateDirectoryMode)" $owner "/var/lib/$(setting StateDirectory)"
    # shellcheck disable=SC2086 # words
    install -d -m 755 $owner "/run/$(setting RuntimeDirectory)"
    read -r -a command < <(setting ExecStart)
    (as_the_unit_says "${command[@]}") >> /check/journal 2>&1 &
    eventually l7rp healthcheck --ready
}
stop() {
    local main
    main=$(main_process)
    kill -TERM "$main"
    is_gone() { ! test -e "/proc/$main"; }
    eventually is_gone
    # systemd's, at a stop.
    rm -r "/run/$(setting RuntimeDirectory)"
}
# systemd runs each with MAINPID, and goes on to the next only if it succeeds.
reload() {
    local MAINPID line
    MAINPID=$(main_process)
    export MAINPID
    while read -r line; do
        (eval "as_the_unit_says $line") || return
    done < <(setting ExecReload)
}

systemctl() {
    { set +x; } 2> /dev/null
    case $* in
    daemon-reload) ;;
    "enable --now l7rp") start ;;
    "reload l7rp") reload ;;
    "kill --kill-whom=main --signal=SIGUSR2 l7rp") kill -USR2 "$(main_process_before)" ;;
    "disable --now l7rp "*) stop ;;
    *) fail "nothing stands for systemctl $*" ;;
    esac
    set -x
}
# Its file is no longer there.
main_process_before() { echo "$main"; }
journalctl() { tail -n 20 /check/journal; }
events() { grep -c "\"event\":\"$1\"" /check/journal || true; }

: > /check/journal
# What tools of systemd make where it does not run.
mkdir -p /run/systemd
before_installation

section "Install, without systemd"
#@ Install
shows '^app request=' curl -fsS http://localhost/
main=$(main_process)
shows '^Uid:[[:space:]]*\([1-9][0-9]*\)[[:space:]]*\1[[:space:]]' grep Uid "/proc/$main/status"
test "$(stat -c %U "/proc/$main")" = l7rp || fail "it does not run as l7rp"
grep -q '^CapEff:[[:space:]]*0000000000000400$' "/proc/$main/status" || fail "it has other capabilities"
grep -q '^CapBnd:[[:space:]]*0000000000000400$' "/proc/$main/status" || fail "it may get other capabilities"
grep -q '^NoNewPrivs:[[:space:]]*1$' "/proc/$main/status" || fail "it may gain privileges"
shows_its_limits "$main"

section "Change the configuration, without systemd"
begin_load
does sed -i 's/127.0.0.1:3000/127.0.0.1:3001/' /etc/l7rp/config.yaml
#@ Change the configuration
is_reloaded() { test "$(events config_reloaded)" -ge 1; }
eventually is_reloaded
shows '^other request=' curl -fsS http://localhost/
cp /etc/l7rp/config.yaml /check/good.yaml
does break_the_configuration
refuses routse reload
shows '^other request=' curl -fsS http://localhost/
cat /check/good.yaml > /etc/l7rp/config.yaml

section "Another binary, without systemd"
another_binary
#@ Another binary
is_gone() { ! test -e "/proc/$main"; }
eventually is_gone
end_load
main=$(main_process)
is_the_new_file "$main" || fail "it is the old binary that runs"
shows '^other request=' curl -fsS http://localhost/
test "$(stat -c %U "/proc/$main")" = l7rp || fail "the new one does not run as l7rp"

section "Remove, without systemd"
#@ Remove
nothing_is_left
section "All is well, without systemd"
