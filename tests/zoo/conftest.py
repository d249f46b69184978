"""Leaves whole trainings to the full suite, but for one recipe: that the others run as well costs minutes."""

from __future__ import annotations

import pytest

#: The recipe whose fixture ``finished``, a miniature of all its stages, runs by default.
USUAL = "test_train_sums.py"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of recipes that were run whole."""
    for item in items:
        whole = "finished" in getattr(item, "fixturenames", ()) and item.path.parent.name == "zoo"
        if whole and item.path.name != USUAL:
            item.add_marker(pytest.mark.full)
