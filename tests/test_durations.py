"""Each quick test has a recorded duration, and together they take at most twelve minutes on two cores."""

import pytest

from support import durations


def test_quick_tests_are_recorded_and_keep_to_twelve_minutes(request):
    """Looks at the quick tests that this run collected."""
    if request.config.getoption("record_durations"):
        pytest.skip("durations are being recorded")
    quick = [item.nodeid for item in request.session.items if not item.get_closest_marker("slow")]
    functions = {durations.function_of(test_id) for test_id in quick}
    record = durations.read()
    unknown = [f"{path}::{name}" for path, name in sorted(functions) if name not in record.get(path, {})]
    assert not unknown, f"{len(unknown)} without a duration, first {unknown[0]}: {durations.COMMAND} {unknown[0]}"
    seconds = sum(record[path][name] for path, name in functions)
    assert seconds <= durations.MOST_SECONDS, (
        f"{seconds:.0f} > {durations.MOST_SECONDS} s: mark tests slow, {durations.COMMAND}"
    )
