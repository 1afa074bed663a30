# Runs in a network namespace of its own. l7rp listens at 10.9.0.1; a client at 10.9.0.2, played
# here octet by octet over a TUN device, has a round trip of RTT ms. It connects just before the
# proxy is told to stop accepting.
import fcntl, os, struct, subprocess, sys, time, socket, signal, select, json
RTT = float(sys.argv[1]); BIN = sys.argv[2]
def run(c): subprocess.check_call(c, shell=True)
run("ip link set lo up")
tun = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(tun, 0x400454ca, struct.pack("16sH", b"tun0", 0x1001))
run("ip addr add 10.9.0.1/24 dev tun0; ip link set tun0 up")
d = "/tmp/rtt"
open(d + "/c.yaml", "w").write('''listeners: [{ name: web, bind: "10.9.0.1:8080" }]
upstream_pools: [{ name: b, upstreams: [{ url: "http://127.0.0.1:1" }] }]
routes: [{ name: r, respond: { status: 200, body: hello } }]
admin: { bind: "127.0.0.1:0" }
''')
p = subprocess.Popen([BIN, "--config", d + "/c.yaml"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
print(p.stdout.readline()[:60])
def csum(b):
    if len(b) % 2: b += b"\0"
    s = sum(struct.unpack("!%dH" % (len(b)//2), b)); s = (s >> 16) + (s & 0xffff); s += s >> 16
    return ~s & 0xffff
A, B = socket.inet_aton("10.9.0.2"), socket.inet_aton("10.9.0.1")
def seg(sport, seq, ack, flags, data=b""):
    t = struct.pack("!HHIIBBHHH", sport, 8080, seq, ack, 5 << 4, flags, 65000, 0, 0)
    c = csum(A + B + struct.pack("!BBH", 0, 6, len(t) + len(data)) + t + data)
    t = t[:16] + struct.pack("!H", c) + t[18:]
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(t) + len(data), 1, 0, 64, 6, 0, A, B)
    ip = ip[:10] + struct.pack("!H", csum(ip)) + ip[12:]
    os.write(tun, ip + t + data)
def recv(limit):
    end = time.time() + limit
    while time.time() < end:
        r, _, _ = select.select([tun], [], [], max(0, end - time.time()))
        if not r: return None
        b = os.read(tun, 4096)
        if b[0] >> 4 == 4 and b[9] == 6:
            h = b[(b[0] & 15) * 4:]
            sp, dp, seq, ack, off, fl = struct.unpack("!HHIIBB", h[:14])
            return seq, ack, fl, h[(off >> 4) * 4:]
time.sleep(0.3)
seg(4444, 1000, 0, 0x02)
seq, ack, fl, _ = recv(1); assert fl == 0x12, fl
t0 = time.time()
p.send_signal(signal.SIGTERM)
time.sleep(RTT / 1000)
seg(4444, 1001, seq + 1, 0x10)
seg(4444, 1001, seq + 1, 0x18, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
out = []
while True:
    r = recv(1.5)
    if r is None: break
    out.append((hex(r[2]), r[3][:40]))
    if r[2] & 4: break
print("RTT", RTT, "ms ->", out)
p.kill()
