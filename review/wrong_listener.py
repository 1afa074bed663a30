import subprocess, socket, threading, time, json, signal, sys, os, tempfile
BIN, POOLS, ROUNDS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
d = tempfile.mkdtemp(); cfg = d + "/c.yaml"
def free():
    s = socket.socket(); s.bind(("127.0.0.1", 0)); return s.getsockname()[1]
pub, inn = free(), free()
def yaml(with_public):
    l = '- { name: public, bind: "127.0.0.1:%d" }\n' % pub if with_public else ''
    r = '- { name: open, listeners: [public], respond: { status: 200, body: public } }\n' if with_public else ''
    pools = ''.join('- { name: p%d, upstreams: [{ url: "http://127.0.0.1:1" }] }\n' % i for i in range(POOLS))
    return f'''listeners:
{l}- {{ name: internal, bind: "127.0.0.1:{inn}" }}
upstream_pools:
{pools}
routes:
{r}- {{ name: hidden, listeners: [internal], respond: {{ status: 200, body: SECRET }} }}
admin: {{ bind: "127.0.0.1:0" }}
access_log: {{ enabled: false }}
'''
def put(x): open(cfg, "w").write(yaml(x))
put(True)
p = subprocess.Popen([BIN, "--config", cfg], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
events = []
def rd():
    for line in p.stdout: events.append(json.loads(line))
threading.Thread(target=rd, daemon=True).start()
while not events: time.sleep(.01)
leaks = 0; asked = 0
def client(stop):
    global leaks, asked
    s = socket.create_connection(("127.0.0.1", pub))
    try:
        while not stop.is_set():
            s.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            b = s.recv(4096)
            if not b: return
            asked += 1
            if b"SECRET" in b: leaks += 1
    except OSError: pass
def reload(x):
    n = len([e for e in events if e["event"] in ("config_reloaded", "config_rejected")])
    put(x); p.send_signal(signal.SIGHUP)
    while True:
        r = [e for e in events if e["event"] in ("config_reloaded", "config_rejected")]
        if len(r) > n: assert r[-1]["event"] == "config_reloaded", r[-1]; return r[-1]
        time.sleep(.002)
took = []
for _ in range(ROUNDS):
    stop = threading.Event()
    ts = [threading.Thread(target=client, args=(stop,)) for _ in range(6)]
    for t in ts: t.start()
    time.sleep(.03)
    took.append(reload(False)["took_ms"]); stop.set()
    for t in ts: t.join()
    reload(True)
print(f"pools={POOLS} rounds={ROUNDS} asked={asked} leaks={leaks} took_ms max={max(took):.1f}")
p.kill()
