"""The tests of partsong."""

from tests.newer_names import fill_in

fill_in()
