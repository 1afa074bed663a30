"""The descriptions that come with the kit say what the cases need."""

import unittest

from benchkit import bench, peers, template
from benchkit.cases import CASES, Shape

COMMON = {"work": "work", "first_port": 8100, "backend_port": 9000, "cores": 1, "collector": "127.0.0.1:9001"}


def peer(name):
    return peers.Peer.create(name, 0, COMMON, [0])


class Descriptions(unittest.TestCase):
    def test_all_of_them_are_read_and_rendered(self):
        for name in bench.known_peers():
            one = peer(name)
            for case in CASES.values():
                if not one.lacks(case):
                    for _, text in one.templates():
                        items = peers.lists(Shape(2, min(case.shape.routes, 2)), 9000)
                        self.assertNotRegex(template.render(text, one.values, items), "@(for|end|more_)", name)

    def test_the_program_under_test_is_first_and_has_every_case(self):
        self.assertEqual(bench.known_peers()[0], "l7rp")
        self.assertEqual([case.name for case in CASES.values() if peer("l7rp").lacks(case)], [])

    def test_the_usual_peers_have_many_upstreams_and_routes(self):
        for name in ("nginx", "haproxy"):
            for case in ("upstreams100", "routes1000", "routes100k"):
                self.assertEqual(peer(name).lacks(CASES[case]), "", f"{name}, {case}")
        self.assertEqual(peer("pingora").lacks(CASES["upstreams100"]), "no list of upstreams in its templates")
        self.assertEqual(peer("pingora").lacks(CASES["h2"]), "no h2 in its listeners")

    def test_a_variant_has_its_own_cases_and_what_it_extends(self):
        log = peer("l7rp-log")
        self.assertEqual((log.is_variant_of(), log.values["access_log"]), ("l7rp", "true"))
        self.assertEqual(log.lacks(CASES["small"]), "")
        self.assertEqual(log.lacks(CASES["1m"]), "a variant, for a few cases")
        self.assertIsNone(peer("haproxy-64k").is_variant_of())

    def test_values_may_use_words(self):
        self.assertIn('endpoint: "127.0.0.1:9001"', peer("l7rp-trace").values["more_top"])

    def test_names_of_cases_in_descriptions_exist(self):
        for name in bench.known_peers():
            self.assertLessEqual(set(peer(name).told.get("cases", [])), set(CASES), name)

    def test_ports_do_not_meet(self):
        nginx, ours = peer("nginx"), peer("l7rp")
        self.assertEqual(nginx.ports(), {8100, 8101, 8102})
        self.assertEqual((ours.port("h2c"), ours.port("h2")), (8100, 8101))

    def test_what_is_not_there_is_named(self):
        with self.assertRaisesRegex(peers.PeerError, "no such proxy: nobody"):
            peer("nobody")
