"""`pytest --processes 3`: tests are imported and collected once, and run in forks of the process that did so."""

import itertools
import multiprocessing
import multiprocessing.connection
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized

import pytest
from processes import keep_the_server


def run(session: pytest.Session, processes: int) -> None:
    """A file's tests share its fixtures, so a process takes whole files, the next one where the last one ends."""
    context = multiprocessing.get_context("fork")
    files = [
        list(items) for _, items in itertools.groupby(session.items, key=lambda item: item.path)
    ]
    taken = context.Value("i", 0)
    workers = {}
    for _ in range(processes):
        receiving, sending = context.Pipe(duplex=False)
        workers[receiving] = context.Process(target=work, args=(session, files, taken, sending))
        workers[receiving].start()
        sending.close()  # else the end of what a worker sends is never seen
    try:
        done = set(follow(session, list(workers)))
    finally:
        for worker in workers.values():
            if session.shouldfail or session.shouldstop:
                worker.kill()
            worker.join()
    ends = sorted({worker.exitcode for worker in workers.values()})
    for item in session.items:
        if item.nodeid not in done:
            why = f"the process that had it, or was to have it, ended before it was done: exit codes {ends}"
            lost = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
            session.config.hook.pytest_runtest_logreport(report=lost)


def follow(session: pytest.Session, connections: list[Connection]) -> Iterator[str]:
    """Passes on what workers send; yields the names of tests that are done."""
    hook = session.config.hook
    while connections:
        for connection in multiprocessing.connection.wait(connections):
            try:
                report, warning = connection.recv()
            except EOFError:
                connections.remove(connection)
                continue
            if warning:
                hook.pytest_warning_recorded.call_historic(kwargs=warning)
                continue
            report = hook.pytest_report_from_serializable(config=session.config, data=report)
            hook.pytest_runtest_logreport(report=report)
            if report.when == "teardown":
                yield report.nodeid
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)


def work(
    session: pytest.Session,
    files: list[list[pytest.Item]],
    taken: "Synchronized[int]",
    sending: Connection,
):
    """In a fork."""
    plugins = session.config.pluginmanager
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # what it has kept output in would be shared by all forks
    capture.start_global_capturing()
    capture.suspend_global_capture()
    plugins.unregister(name="terminalreporter")
    plugins.register(Sender(session.config, sending))
    keep_the_server()

    def upcoming() -> Iterator[pytest.Item]:
        while True:
            with taken.get_lock():
                number = taken.value
                taken.value += 1
            if number >= len(files):
                return
            yield from files[number]

    for item, following in itertools.pairwise(itertools.chain(upcoming(), [None])):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


class Sender:
    """Reports and warnings of a fork, to the process that shows them."""

    def __init__(self, config: pytest.Config, sending: Connection) -> None:
        self.config, self.sending = config, sending

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.sending.send((data, None))

    def pytest_warning_recorded(self, warning_message, when, nodeid, location) -> None:
        """Its text instead of the warning itself, which need not bear pickling."""
        shown = warnings.WarningMessage(
            str(warning_message.message),
            warning_message.category,
            warning_message.filename,
            warning_message.lineno,
        )
        self.sending.send(
            (None, {"warning_message": shown, "when": when, "nodeid": nodeid, "location": location})
        )
