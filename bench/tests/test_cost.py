"""Ratios are taken within a round: a slow spell that lasts for a whole one is none of the log's."""

import unittest
from contextlib import redirect_stderr
from io import StringIO
from unittest import mock

import cost


class Tells(unittest.TestCase):
    def test_a_round_is_compared_with_itself(self):
        rounds = [{name: (off * (1.0 if name == "off" else 1.1), off * 2) for name in cost.SETTINGS}
                  for off in (10.0, 20.0, 30.0)]
        table = cost.cost_table(rounds).splitlines()
        self.assertIn("| off | 20.00 | 1.000 (1.000–1.000) | 40.00 | 1.000 (1.000–1.000) |", table)
        self.assertIn("| log | 22.00 | 1.100 (1.100–1.100) | 40.00 | 1.000 (1.000–1.000) |", table)
        self.assertEqual(len(table), 2 + len(cost.SETTINGS))

    def test_quarters(self):
        self.assertEqual(cost.quarters([1.0, 1.0, 2.0, 3.0, 3.0]), "2.000 (1.000–3.000)")

    def test_quarters_of_few_stay_among_them(self):
        self.assertEqual(cost.quarters([1.0, 9.0]), "5.000 (3.000–7.000)")

    def test_too_few_are_refused_before_anything_is_measured(self):
        for argv in (["--rounds", "1"], ["--starts", "0"]):
            with (mock.patch("sys.argv", ["cost.py", *argv]), redirect_stderr(StringIO()) as said,
                  self.assertRaises(SystemExit)):
                cost.arguments()
            self.assertIn("at least two rounds and one start", said.getvalue())

    def test_latencies_are_told_with_what_was_measured(self):
        told = cost.TAILS.format(lines=5000, rounds=2, seconds=1)
        self.assertIn("5000 answers a second are due, made by the proxy itself", told)
        self.assertIn("2 rounds of 1 s", told)
