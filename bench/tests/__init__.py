"""The kit's own tests: python3 -m unittest discover -s bench/tests -t bench."""
