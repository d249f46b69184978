"""Skips tests that need a class which the installed libraries lack, wherever they meet it, also on a rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.newer_names import WORDS

__all__ = ["SkipNewer"]


def _reason(said: str) -> str:
    """Returns the words of a text that say what there is not."""
    return said[said.index(WORDS) :].splitlines()[0]


class SkipNewer:
    """Is a plugin of pytest, for older libraries."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
        report = yield
        if report.failed and call.excinfo is not None and WORDS in str(call.excinfo.value):
            report.outcome, report.longrepr = "skipped", (str(item.path), None, _reason(str(call.excinfo.value)))
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[pytest.CollectReport]:
        report = yield
        if report.failed and WORDS in str(report.longrepr):
            report.outcome, report.longrepr = "skipped", (str(collector.path), None, _reason(str(report.longrepr)))
        return report
