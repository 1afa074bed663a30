"""Figures, tables, plots, and what is written into the README."""

import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import publish
from benchkit import plots, report

NOTHING = {"p50": None, "p99": None, "p999": None}


def sample(us, **more):
    figures = {"us": us, "per_second": 1000.0, "proxy_core": 99.0, "load_core": 80.0, "memory": 20.0, "errors": 0}
    return NOTHING | figures | more


def record():
    def case(rate=0, **times):
        return {"about": "a & b", "rate": rate, "summary": {n: report.summary([s]) for n, s in times.items()}}

    late = sample(50.0, p50=0.5, p99=900.0, p999=950.0, per_second=500.0)
    return {
        "machine": "2 CPUs", "setting": "3 rounds", "variants": {"l7rp-log": "l7rp"},
        "versions": {"l7rp": "1.0.0", "l7rp-log": "1.0.0", "nginx": "1.22.1"},
        "cases": {
            "small": case(l7rp=sample(11.0), nginx=sample(14.0), **{"l7rp-log": sample(12.5)}),
            "tls": case(l7rp=sample(15.0), nginx=sample(13.0)),
            "openloop": case(1000, l7rp=sample(40.0, p50=0.2, p99=1.5, p999=3.0), nginx=late),
        },
        "command": "compare.py -c small,tls,openloop",
        "not_asked": {"proxies": ["envoy"], "cases": []},
        "left_out": {"nginx": {"h2": "no answer", "h2c": "no answer"},
                     "pingora": {"all cases": "pingora: /a/b/bin/pingora-peer:\nnot there"}},
    }


class Figures(unittest.TestCase):
    def test_the_median_and_the_extremes(self):
        three = report.summary([sample(3.0), sample(1.0, p99=2.0), sample(8.0)])
        self.assertEqual((three["us"], three["us_min"], three["us_max"], three["rounds"]), (3.0, 1.0, 8.0, 3))
        self.assertEqual((three["p99"], three["p50"]), (2.0, None))

    def test_the_ratio_of_two(self):
        results = {"a": {"us": 9.0}, "b": {"us": 10.0}}
        self.assertEqual(report.ratio_line("small", "a", "b", results, "us"), ("small: a 9.0 µs / b 10.0 µs = 0.90", 0.9))


class Tables(unittest.TestCase):
    def test_the_cheapest_comes_first(self):
        lines = report.text_table(record()["cases"]["tls"]["summary"]).splitlines()
        self.assertEqual([line.split()[0] for line in lines], ["proxy", "nginx", "l7rp"])

    def test_what_an_idle_connection_takes_is_told_where_there_are_some(self):
        plain, idle = report.summary([sample(1.0)]), report.summary([sample(1.0, idle_kib=0.987)])
        self.assertNotIn("idle", report.case_table({"l7rp": plain}))
        table = report.case_table({"l7rp": idle, "nginx": plain})
        self.assertRegex(table.splitlines()[0], r"KiB each idle \|$")
        self.assertRegex(table, r"(?m)^\| l7rp .* 0\.99 \|$")
        self.assertRegex(table, r"(?m)^\| nginx .* – \|$")

    def test_variants_have_a_table_of_their_own(self):
        peers, variants = report.overview(record()).split("\n\n")
        self.assertIn("| small | **11.0** | 14.0 |", peers)
        self.assertEqual(variants.splitlines()[0], "| case | l7rp | l7rp-log |")
        self.assertEqual(variants.splitlines()[2:], ["| small | 11.0 | 12.5 |"])

    def test_figures_with_errors_are_marked(self):
        told = record()
        small = told["cases"]["small"]["summary"]
        small["l7rp"] = report.summary([sample(11.0), sample(11.0, errors=2), sample(11.0)])
        self.assertEqual(small["l7rp"]["errors"], 2)
        self.assertIn("| small | **11.0**† | 14.0 |", report.overview(told))
        self.assertIn("† with errors", report.overview(told))
        self.assertNotIn("†", report.overview(record()))

    def test_folders_of_the_machine_are_no_result(self):
        for text, want in (("--work /a/b/w -p l7rp,/a/o.toml", "--work w -p l7rp,o.toml"), ("--work=/a/b/w", "--work=w"),
                           ("target/bench/run at http://h:1/a/b", "target/bench/run at http://h:1/a/b")):
            self.assertEqual(report.without_folders(text), want)

    def test_the_document_has_it_all(self):
        text = report.document(record())
        for part in ("2 CPUs; 3 rounds.", "### openloop: a & b", "| l7rp | 40.00 |", "By `compare.py -c small,tls,openloop`.",
                     "- not asked for: proxies envoy\n- nginx (h2, h2c): no answer\n"
                     "- pingora (all cases): pingora-peer: not there\n"):
            self.assertIn(part, text)

    def test_the_readme_keeps_the_rest(self):
        text = "a\n<!-- bench -->\nold\n<!-- /bench -->\nb\n"
        self.assertEqual(publish.into(text, "new"), "a\n<!-- bench -->\n\nnew\n\n<!-- /bench -->\nb\n")
        with self.assertRaises(ValueError):
            publish.into("no marks", "new")
        self.assertIn("\nnew\n", publish.into(publish.README.read_text(), "new"))


class Plots(unittest.TestCase):
    def test_linear_scale(self):
        self.assertEqual([plots.linear(v, 20.0, 100.0) for v in (0.0, 5.0, 20.0)], [0.0, 25.0, 100.0])
        self.assertEqual(plots.linear(0.0, 0.0, 100.0), 0.0)

    def test_logarithmic_scale(self):
        lengths = [plots.logarithmic(v, 0.1, 1000.0, 400.0) for v in (0.0, 0.1, 1.0, 100.0, 1000.0, 5000.0)]
        for got, want in zip(lengths, (0.0, 0.0, 100.0, 300.0, 400.0, 400.0)):
            self.assertAlmostEqual(got, want)

    def test_decades_enclose(self):
        for values, want in (([0.3, 42.0], (0.1, 100.0)), ([1.0], (1.0, 10.0)), ([0.0], (1.0, 10.0)), ([], (1.0, 10.0))):
            self.assertEqual(plots.decades(values), want)

    def test_a_bar_for_each_proxy(self):
        panels = publish.time_panels(record())
        self.assertEqual([title for title, _ in panels], ["small", "tls", "openloop", "small, more switched on"])
        image = ElementTree.fromstring(plots.processor_time(panels))
        bars = [e for e in image.iter() if e.tag.endswith("rect")]
        self.assertEqual(len(bars), 8)
        ours = [bar.get("fill") for bar in bars if bar.get("fill") == plots.OURS]
        self.assertEqual(len(ours), 5)

    def test_a_picture_that_the_run_has_nothing_for_goes(self):
        told, without = record(), record()
        del without["cases"]["openloop"]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            readme, results, plot = folder / "README.md", folder / "results.json", folder / "plots/openloop.svg"
            readme.write_text("a\n<!-- bench -->\n<!-- /bench -->\nb\n")
            for run, has in ((told, True), (without, False)):
                results.write_text(json.dumps(run))
                with mock.patch.multiple(publish, HERE=folder, README=readme), mock.patch("sys.argv", ["", results]):
                    self.assertEqual(publish.main(), 0)
                self.assertEqual((plot.exists(), "openloop.svg" in readme.read_text()), (has, has))
                self.assertIn("2 CPUs; by `compare.py -c small,tls,openloop`.", readme.read_text())
                self.assertIn("](bench/plots/cpu.svg)", readme.read_text())

    def test_pictures_of_the_readme_are_between_the_marks(self):
        self.assertNotIn(".svg", publish.into(publish.README.read_text(), ""))

    def test_who_falls_behind_is_told(self):
        [(title, bars)] = publish.latency_panels(record())
        self.assertEqual(title, "openloop: 1000/s")
        self.assertEqual(bars[0], ("l7rp", 1.5, "1.50 (p99.9 3.00)"))
        self.assertIn("falls behind", bars[1][2])
        ElementTree.fromstring(plots.latency([(title, bars)]))
