"""By the record of durations, the quick tests take at most 24 minutes of one core."""

import pytest

from support import durations

UNRECORDED_SECONDS = 10  # of a new test until the next record: more than most tests take
MOST_UNRECORDED = 80


def test_quick_tests_keep_to_their_minutes(request):
    """Only the quick tests that this run collected are counted."""
    if request.config.getoption("record_durations"):
        pytest.skip("durations are being recorded")
    quick = [item.nodeid for item in request.session.items if not item.get_closest_marker("slow")]
    functions = {durations.function_of(test_id) for test_id in quick}
    record = durations.read()
    unknown = [
        f"{path}::{name}" for path, name in sorted(functions) if name not in record.get(path, {})
    ]
    assert len(unknown) <= MOST_UNRECORDED, (
        f"{len(unknown)} without a duration, first {unknown[0]}: {durations.COMMAND}"
    )
    seconds = sum(record.get(path, {}).get(name, UNRECORDED_SECONDS) for path, name in functions)
    assert seconds <= durations.MOST_SECONDS, (
        f"{seconds:.0f} > {durations.MOST_SECONDS} s: mark tests slow, {durations.COMMAND}"
    )
