# A listener is added, and a SIGTERM follows at once, while the worker gets little of the processor.
import subprocess, socket, time, json, signal, sys, os, tempfile, multiprocessing, threading
BIN, ROUNDS = sys.argv[1], int(sys.argv[2])
def burn():
    os.sched_setaffinity(0, {0})
    while True: pass
def free():
    s = socket.socket(); s.bind(("127.0.0.1", 0)); return s.getsockname()[1]
res = {}
b = [multiprocessing.Process(target=burn, daemon=True) for _ in range(1)]
for x in b: x.start()
for _ in range(ROUNDS):
    d = tempfile.mkdtemp(); cfg = d + "/c.yaml"; a, n = free(), free()
    def put(more):
        l = '- { name: new, bind: "127.0.0.1:%d" }\n' % n if more else ''
        open(cfg, "w").write(f'''listeners:
- {{ name: old, bind: "127.0.0.1:{a}" }}
{l}upstream_pools:
- {{ name: p, upstreams: [{{ url: "http://127.0.0.1:1" }}] }}
routes:
- {{ name: r, respond: {{ status: 200, body: hello }} }}
admin: {{ bind: "127.0.0.1:0" }}
workers: 1
''')
    put(False)
    p = subprocess.Popen([BIN, "--config", cfg], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    p.stdout.readline()
    for t in os.listdir(f"/proc/{p.pid}/task"):
        os.sched_setaffinity(int(t), {0})
        if "worker" in open(f"/proc/{p.pid}/task/{t}/comm").read(): os.setpriority(os.PRIO_PROCESS, int(t), 19)
    time.sleep(.05)
    put(True)
    p.send_signal(signal.SIGHUP)
    end = time.time() + 2; s = None
    while time.time() < end:
        try: s = socket.create_connection(("127.0.0.1", n), .5); break
        except OSError: pass
    p.send_signal(signal.SIGTERM)
    try:
        s.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"); s.settimeout(5); r = s.recv(100)
        k = "answered" if b"200" in r else "closed"
    except Exception as e: k = type(e).__name__
    res[k] = res.get(k, 0) + 1
    p.wait(10)
print(res)
for x in b: x.terminate()
