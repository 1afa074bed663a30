"""Ratios are taken within a round: a slow spell that lasts for a whole one is none of the log's."""

import unittest

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
