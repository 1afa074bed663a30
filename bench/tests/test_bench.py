"""What a sample has to be to become a figure."""

import argparse
import contextlib
import io
import os
import signal
import subprocess
import unittest
import unittest.mock

import compare
from benchkit import bench, loads, machine, peers
from benchkit.cases import CASES

COMMON = {"work": "work", "bin": "bin", "first_port": 8100, "backend_port": 9000, "cores": 1, "collector": ""}
SMALL = CASES["small"]


class Standing(peers.Peer):
    """A proxy that needs no asking: a shell with one child."""

    def start(self):
        script = ["sh", "-c", "sleep 60 & echo; wait; exec sleep 60"]
        self.process = subprocess.Popen(script, stdout=subprocess.PIPE, start_new_session=True)
        with self.process.stdout as said:
            said.readline()

    def check(self, case):
        pass


class Samples(unittest.TestCase):
    def setUp(self):
        self.enterContext(contextlib.redirect_stderr(io.StringIO()))
        self.bench = bench.Bench.__new__(bench.Bench)
        self.bench.args = argparse.Namespace(rounds=2, seconds=1, warm=0, calm=0)
        self.bench.proxy_cores = self.bench.load_cores = [0]
        self.bench.setting = None
        self.bench.peers = [Standing.create(name, 0, COMMON, [0]) for name in ("l7rp", "nginx", "pingora")]
        for peer in self.bench.peers:
            self.addCleanup(self.end, peer)

    def end(self, peer):
        if peer.process:
            os.killpg(peer.process.pid, signal.SIGKILL)
            peer.process.wait()

    def answer(self, seen, meanwhile=lambda: None):
        def tool(setting, case, port, seconds):
            meanwhile()
            return seen

        self.enterContext(unittest.mock.patch.dict(loads.TOOLS, wrk=tool))

    def test_whose_worker_ends_in_a_sample_has_no_figure(self):
        ours, other, _ = self.bench.peers
        count = iter(range(100))

        def kill_in_the_second_round():
            if next(count) == 3:
                child = next(pid for pid in other.family() if pid != other.process.pid)
                os.kill(child, signal.SIGKILL)
                while child in other.family():
                    pass

        self.answer(loads.Outcome(1000, 1000.0, 0), kill_in_the_second_round)
        seen = self.bench.run_case(SMALL)
        self.assertEqual({name: len(taken) for name, taken in seen.items()}, {"l7rp": 2, "pingora": 2})
        self.assertRegex(other.failed["small"], r"process \d+ ended during the sample")
        self.assertEqual(ours.failed, {})

    def test_who_refuses_has_no_figure(self):
        self.answer(loads.Outcome(1000, 1000.0, 11))
        self.assertEqual(self.bench.run_case(SMALL), {})
        self.assertEqual(self.bench.peers[0].failed, {"small": "11 errors beside 1000 right answers"})

    def test_a_few_errors_are_told_beside_the_figure(self):
        self.answer(loads.Outcome(1000, 1000.0, 10))
        self.assertEqual(self.bench.run_case(SMALL)["nginx"][0]["errors"], 10)

    def test_who_answers_wrongly_after_a_sample_has_no_figure(self):
        nginx = self.bench.peers[1]
        nginx.check = unittest.mock.Mock(side_effect=[None, peers.PeerError("status 301, 0 bytes")])
        self.answer(loads.Outcome(1000, 1000.0, 0))
        self.assertNotIn("nginx", self.bench.run_case(SMALL))
        self.assertEqual(nginx.failed, {"small": "status 301, 0 bytes"})

    def test_who_closes_idle_connections_has_no_figure(self):
        case = CASES["c10000"]
        self.answer(loads.Outcome(1_000_000, 1000.0, 0))
        with unittest.mock.patch.object(loads, "Idle") as idle:
            idle.return_value.release.return_value = 99
            self.assertIn("l7rp", self.bench.run_case(case))
            idle.return_value.release.return_value = 100
            self.assertEqual(self.bench.run_case(case), {})
        self.assertEqual(self.bench.peers[0].failed, {"c10000": "it closed 100 of 9936 idle connections"})

    def test_what_idle_connections_take_is_seen_on_a_new_process(self):
        case = CASES["c10000"]
        self.answer(loads.Outcome(1_000_000, 1000.0, 0))
        ours = self.bench.peers[0]
        ours.reshape(case.shape)
        before = ours.process.pid
        mib = iter(range(100, 1000, 2))
        with (
            unittest.mock.patch.object(loads, "Idle") as idle,
            unittest.mock.patch.object(bench.machine, "memory_mib", lambda pids: next(mib)),
        ):
            idle.return_value.release.return_value = 0
            first, second = self.bench.run_case(case)["l7rp"]
        self.assertNotEqual(ours.process.pid, before)
        self.assertAlmostEqual(first["idle_kib"], 2 * 1024 / 9936)
        self.assertIsNone(second["idle_kib"])
        self.assertIsNone(self.bench.run_case(SMALL)["l7rp"][0]["idle_kib"])

    def test_a_case_that_a_proxy_lacks_is_told(self):
        self.bench.peers = self.bench.peers[2:]
        self.assertEqual(self.bench.run_case(CASES["tls"]), {})
        self.assertEqual(self.bench.peers[0].failed, {"tls": "no tls in its listeners"})

    def test_who_does_not_start_is_told(self):
        self.bench.helpers = []
        self.bench.work = bench.Path("work")
        self.bench.args.backend_port = 9000
        ours = self.bench.peers[0]
        for peer in self.bench.peers:
            peer.start = lambda: None
        ours.start = unittest.mock.Mock(side_effect=peers.PeerError("l7rp did not start"))
        with unittest.mock.patch.object(bench.helpers, "backend"):
            self.bench.start()
        self.assertEqual(ours.failed, {"all cases": "l7rp did not start"})
        self.assertNotIn(ours, self.bench.peers)

    def test_a_case_without_a_rate_is_told(self):
        self.bench.with_rate = unittest.mock.Mock(side_effect=RuntimeError("no right answer"))
        self.assertIsNone(compare.measured(self.bench, CASES["openloop50"]))
        self.assertEqual(self.bench.peers[1].failed, {"openloop50": "no right answer"})


class Times(unittest.TestCase):
    def test_what_was_used_between(self):
        before = {1: (1.0, 0.5, 0.5), 2: (2.0, 1.0, 1.0)}
        after = {1: (1.5, 0.5, 1.0), 2: (2.0, 1.0, 1.0), 3: (1.0, 1.0, 0.0)}
        self.assertEqual(machine.spent(before, after), (1.5, 1.0, 0.5))

    def test_a_counter_that_went_backwards(self):
        with self.assertRaisesRegex(RuntimeError, "process 1 ended"):
            machine.spent({1: (2.0, 1.0, 1.0)}, {1: (0.1, 0.1, 0.0)})

    def test_who_has_ended_and_is_not_reaped_is_no_family(self):
        with subprocess.Popen(["true"]) as process:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            self.assertEqual(machine.family(process.pid), [])

    def test_threads_that_have_ended_count(self):
        script = ("import threading as t; a = t.Thread(target=lambda: sum(range(10**7))); a.start(); a.join(); "
                  "print(flush=True); input()")
        with subprocess.Popen(["python3", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            tasks = bench.Path(f"/proc/{process.pid}/task")
            while len(list(tasks.iterdir())) > 1:
                pass
            left = int((tasks / str(process.pid) / "schedstat").read_text().split()[0])
            seen = machine.times([process.pid])[process.pid][0]
            process.communicate(b"\n")
        self.assertGreater(seen, left / 1e9 + 0.02)
