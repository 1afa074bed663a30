# SIGUSR2 and, some ms later, SIGTERM: how often does the old process say upgrade_failed while the
# new one lives on? No process is stopped here; only the time between the signals is drawn.
import subprocess, time, json, signal, sys, os, tempfile, random, socket
BIN, ROUNDS = sys.argv[1], int(sys.argv[2])
s = socket.socket(); s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]; s.close()
bad = done = called_off = 0
wait = 0.008
for _ in range(ROUNDS):
    d = tempfile.mkdtemp(); cfg = d + "/c.yaml"
    open(cfg, "w").write(f'''listeners: [{{ name: web, bind: "127.0.0.1:{port}" }}]
upstream_pools: [{{ name: p, upstreams: [{{ url: "http://127.0.0.1:1" }}] }}]
routes: [{{ name: r, respond: {{ status: 200, body: hello }} }}]
admin: {{ bind: "127.0.0.1:0" }}
''')
    out = open(d + "/log", "w+b")
    p = subprocess.Popen([BIN, "--config", cfg], stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    end = time.time() + 5
    while b"proxy_started" not in open(d + "/log", "rb").read():
        time.sleep(.002)
        if time.time() > end: print("does not start; the round before:", *before, sep="\n"); sys.exit(1)
    time.sleep(.02)
    p.send_signal(signal.SIGUSR2)
    time.sleep(max(0, wait + random.uniform(-.0015, .0015)))
    p.send_signal(signal.SIGTERM)
    p.wait(10)
    before = open(d + "/log").read().splitlines()
    ev = [json.loads(l) for l in open(d + "/log", "rb") if l.startswith(b"{")]
    pid = [e["pid"] for e in ev if e["event"] == "upgrade_started"]
    failed = [e for e in ev if e["event"] == "upgrade_failed"]
    if not pid: continue
    time.sleep(.02)
    alive = os.path.exists(f"/proc/{pid[0]}/exe") and "l7rp" in (os.readlink(f"/proc/{pid[0]}/exe") if os.path.exists(f"/proc/{pid[0]}") else "")
    if failed: called_off += 1; wait += .0005
    else: done += 1; wait -= .0005
    if failed and alive: bad += 1
    if alive:
        os.kill(pid[0], signal.SIGKILL)
        time.sleep(.1)  # its address must be free for the next round
print(f"rounds={ROUNDS} upgraded={done} called_off={called_off} of these with the new process left alive={bad} wait~{wait*1000:.1f} ms")
