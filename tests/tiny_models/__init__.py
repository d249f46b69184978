"""Tiny random models that tests of several parts build.

Denoisers are built by the families of `tests.parallel`, UNets by `tests.parallel.unets`.
"""
