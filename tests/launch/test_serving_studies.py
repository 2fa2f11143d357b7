"""The studies of serving: the minutes of an endpoint, and the order of requests."""

import numpy as np
import pytest

from launch.studies import orders, serving
from specsamp import SamplingRequest
from support.services import make_service, running


def test_minute_counts_its_tokens_and_longest_waits():
    of_both = serving.Stream(sent=50.0, times=np.array([55.0, 59.0, 62.0]), tokens=np.ones(3))
    of_second = serving.Stream(sent=61.0, times=np.array([70.0, 70.5]), tokens=np.array([2.0, 4.0]))
    first, second = (serving.of_minute([of_both, of_second], start) for start in (0.0, 60.0))
    assert first == {"tokens_per_second": 2 / 60, "longest_pause": 4.0, "longest_first": 5.0}
    assert second == {"tokens_per_second": 7 / 60, "longest_pause": 3.0, "longest_first": 9.0}
    [row] = serving.first_minutes({"loads": [{"clients": 2, "minutes": [first, second]}]}).rows
    assert row == ("2", "0", "0", "0.29", "4.0", "3.0", "5.0", "9.0")


def test_requests_are_timed_from_their_arrival():
    requests = [SamplingRequest(prompts=["ab"], max_new_tokens=count) for count in (1, 3)]
    with running(make_service()) as service:
        seconds = orders.serve(service, requests, [0.0, 0.2])
    assert seconds.shape == (2,) and (seconds > 0).all()


def test_orders_are_compared_trial_by_trial():
    runs = [
        {
            "kind": "alike",
            "load": 0.5,
            "order": order,
            "ms_per_token": {"mean": mean, "p90": 2 * mean},
            "longest_seconds": 1.0,
            "preempted": 0,
        }
        for order, mean in [
            ("first come", 10),
            ("shortest", 5),
            ("first come", 40),
            ("shortest", 40),
        ]
    ]
    _, shortest = orders.orders({"runs": runs}).rows
    assert shortest == ("alike", "0.5", "shortest", "22 (5 to 40)", "0.75", "45", "1.0", "0")


def test_failed_request_ends_the_study_of_orders():
    with running(make_service()) as service:
        service.batch.runner.begin = None
        with pytest.raises(RuntimeError, match="a request failed"):
            orders.serve(service, [SamplingRequest(prompts=["ab"], max_new_tokens=1)], [0.0])
