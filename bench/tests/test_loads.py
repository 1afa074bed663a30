"""What the load tools print is read rightly."""

import unittest

from benchkit import loads

WRK = """Running 3s test @ http://127.0.0.1:8100/
  1 threads and 64 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     0.87ms    1.02ms  23.55ms   91.73%
    Req/Sec    80.10k     4.02k   86.31k    76.67%
  Latency Distribution
     50%  712.00us
     75%    0.90ms
     90%    1.35ms
     99%    1.20s
  239219 requests in 3.00s, 77.11MB read
Requests/sec:  79682.42
Transfer/sec:     25.68MB
"""
WRK_TROUBLE = """  Socket errors: connect 1, read 2, write 3, timeout 4
  Non-2xx or 3xx responses: 50
"""
H2LOAD = """finished in 3.00s, 58494.33 req/s, 11.05MB/s
requests: 175483 total, 175739 started, 175483 done, 175480 succeeded, 3 failed, 3 errored, 0 timeout
status codes: 175496 2xx, 2 3xx, 2 4xx, 1 5xx
"""
RATE = '{"answers": 90, "rate_per_s": 45.0, "never_started": 4, "statuses": {"200": 88, "502": 2}, ' \
       '"errors": {"connect": 1, "timeout": 3}, "latency": {"p50_us": 812.5, "p99_us": 4200.0, "p999_us": 9100.0}}'


class ReadsTools(unittest.TestCase):
    def test_wrk(self):
        seen = loads.read_wrk(WRK)
        self.assertEqual((seen.done, seen.per_second, seen.errors), (239219, 79682.42, 0))
        self.assertEqual((seen.p50, seen.p99, seen.p999), (0.712, 1200.0, None))

    def test_wrk_counts_every_kind_of_error_and_no_refusal_as_done(self):
        seen = loads.read_wrk(WRK + WRK_TROUBLE)
        self.assertEqual((seen.done, seen.errors), (239169, 60))
        self.assertAlmostEqual(seen.per_second, 79682.42 * 239169 / 239219)

    def test_wrk_that_printed_something_else_has_failed(self):
        with self.assertRaisesRegex(RuntimeError, "unexpected output: no route"):
            loads.read_wrk("no route to host")

    def test_h2load_and_its_log(self):
        log = [f"1700000000\t200\t{n}\n" for n in range(100, 0, -1)]
        seen = loads.read_h2load(H2LOAD, log)
        self.assertEqual((seen.done, seen.errors), (175478, 5))
        self.assertAlmostEqual(seen.per_second, 58494.33 * 175478 / 175483)
        self.assertEqual((seen.p50, seen.p99), (0.051, 0.1))

    def test_h2load_without_an_answer(self):
        self.assertEqual(loads.read_h2load(H2LOAD, []).p99, 0)

    def test_s_time_of_several_clients(self):
        line = "1500 connections in 4 real seconds, 0 bytes read per connection\n"
        self.assertEqual(loads.read_s_time(line * 3, 3), loads.Outcome(4500, 1500.0, 0))
        self.assertEqual(loads.read_s_time("", 3).errors, 1)

    def test_rate(self):
        seen = loads.read_rate(RATE)
        self.assertEqual((seen.done, seen.per_second, seen.errors), (88, 44.0, 6))
        self.assertEqual((seen.p50, seen.p99, seen.p999), (0.8125, 4.2, 9.1))

    def test_what_is_fit_for_a_figure(self):
        for seen in (loads.Outcome(0, 0, 0), loads.Outcome(99, 1, 1)):
            with self.assertRaises(RuntimeError):
                loads.judged(seen)
        fine = loads.Outcome(100, 1, 1)
        self.assertIs(loads.judged(fine), fine)

    def test_rate_without_an_answer(self):
        seen = loads.read_rate('{"answers": 0, "rate_per_s": 0.0, "never_started": 9, "statuses": {}, "errors": {}}')
        self.assertEqual((seen.done, seen.per_second, seen.errors, seen.p99), (0, 0, 0, None))
        with self.assertRaisesRegex(RuntimeError, "no load"):
            loads.read_rate("")
