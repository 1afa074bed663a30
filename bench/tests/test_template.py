"""Templates: words, lists, conditions, and what is refused."""

import unittest

from benchkit import peers, template
from benchkit.cases import PLAIN, Shape

LISTS = {"routes": [{"route": "a"}, {"route": "b"}], "none": []}


class Renders(unittest.TestCase):
    def render(self, text):
        return template.render(text, {"pool": "p", "empty": ""}, LISTS)

    def test_known_words_only(self):
        self.assertEqual(self.render("@pool@ a@b.test @route@ @empty@.\n"), "p a@b.test @route@ .\n")

    def test_a_list(self):
        text = "x\n  @for routes@\n  /@route@ @pool@\n  @end@\ny\n"
        self.assertEqual(self.render(text), "x\n  /a p\n  /b p\ny\n")
        self.assertEqual(self.render("@for none@\nx\n@end@\n"), "")

    def test_conditions(self):
        text = "@if {0}@\nif @pool@\n@end@\n@unless {0}@\nunless\n@end@"
        self.assertEqual(self.render(text.format("routes")), "if p\n")
        self.assertEqual(self.render(text.format("none")), "unless\n")

    def test_blocks_that_are_not_well_formed(self):
        for text in ("@for routes@\n", "@end@\n", "@if none@\n@for routes@\n@end@\n@end@\n", "@for others@\n@end@\n"):
            with self.assertRaises(ValueError, msg=text):
                self.render(text)


class Shapes(unittest.TestCase):
    def test_each_upstream_has_an_address(self):
        items = peers.lists(Shape(upstreams=3), 9000)["upstreams"]
        self.assertEqual([item["upstream"] for item in items], ["127.0.0.1:9000", "127.0.0.2:9000", "127.0.0.3:9000"])

    def test_no_route_is_the_prefix_of_another(self):
        names = [item["route"] for item in peers.lists(Shape(routes=100_000), 9000)["routes"]]
        self.assertEqual(({len(name) for name in names}, len(set(names))), ({7}, 100_000))
        self.assertEqual(peers.lists(PLAIN, 9000)["routes"], [])
