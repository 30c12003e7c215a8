"""Adds up the processor time of tests that run Metal kernels on the CPU; too much fails the run.

Wall time depends on what else a machine does. Processor time hardly does, and counts the compiler.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

#: seconds: three minutes of two cores
LIMIT = 360.0
_PROPERTY = "seconds of Metal on the CPU"
_STARTED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--metal-seconds",
        type=float,
        default=LIMIT,
        help="processor time that tests of Metal kernels may take together, unless --full is given",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Total(config.getoption("--metal-seconds")))


def _spent() -> float:
    """Processor seconds of this process so far, and of those it waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_STARTED] = _spent()
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "teardown" and item.get_closest_marker("metal_cpu"):
        item.user_properties.append((_PROPERTY, _spent() - item.stash[_STARTED]))


class _Total:
    """Of all workers, whose reports arrive where this is registered."""

    def __init__(self, limit: float) -> None:
        self.limit, self.seconds = limit, 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.seconds += sum(
                value for name, value in report.user_properties if name == _PROPERTY
            )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._exceeded(session.config) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        if self.seconds:
            said = f"{self.seconds:.1f} {_PROPERTY}"
            if self._exceeded(config):
                said += f", more than the {self.limit:g} of --metal-seconds: make tests smaller"
            terminalreporter.write_line(said)

    def _exceeded(self, config: pytest.Config) -> bool:
        return self.seconds > self.limit and not config.getoption("--full", False)
