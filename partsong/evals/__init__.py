"""Measures: a parallel run against its serial twin, benchmarks, and the page that shows them."""
