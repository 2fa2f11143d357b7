"""The record of test durations, by file and function."""

import collections
import json
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
PATH = ROOT / "tests" / "durations.json"


def function_of(test_id):
    """Returns the file and the function of a test's id: ``("tests/x.py", "test_y")`` of
    "tests/x.py::test_y[3]".
    """
    path, _, name = test_id.partition("::")
    return path, name.partition("[")[0]


def read():
    """Returns the recorded seconds by file and function: parameters together, but slow ones apart,
    as "test_y, slow".
    """
    return json.loads(PATH.read_text()) if PATH.exists() else {}


class Recorder:
    """A plugin of pytest that writes the record: anew if the run is complete, else in part."""

    def __init__(self, *, complete):
        self.complete = complete
        self.seconds = collections.defaultdict(float)

    def pytest_runtest_logreport(self, report):
        path, name = function_of(report.nodeid)
        self.seconds[path, f"{name}, slow" if "slow" in report.keywords else name] += (
            report.duration
        )

    def pytest_sessionfinish(self):
        record = (
            {}
            if self.complete
            else {path: found for path, found in read().items() if (ROOT / path).exists()}
        )
        for (path, name), seconds in self.seconds.items():
            record.setdefault(path, {})[name] = round(seconds, 1)
        PATH.write_text(json.dumps(record, indent=0, sort_keys=True) + "\n")
