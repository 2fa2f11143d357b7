"""The study of clusters tells rounds that remember each other from rounds that do not."""

import numpy as np
import pytest

from launch.studies import clusters

K = 3


def test_rounds_that_remember_are_told_from_independent_ones():
    accepted = np.minimum(np.random.default_rng(0).geometric(0.4, size=(4, 1, 5000)) - 1, K)
    tokens, independent, full, empty, near, far = clusters.statistics(accepted, K)
    assert independent == pytest.approx(tokens, rel=0.01) and abs(near) < 0.03 and abs(far) < 0.03
    assert full == pytest.approx(0.6, abs=0.03) and empty == pytest.approx(0.6, abs=0.03)
    *_, full, empty, near, far = clusters.statistics(np.repeat(accepted, 3, axis=-1), K)
    assert full > 0.8 and empty < 0.3 and near > 0.6 and abs(far) < 0.03


def test_rounds_of_all_or_nothing_are_longer_than_independent_ones():
    accepted = K * np.random.default_rng(0).integers(2, size=(4, 1, 500))
    tokens, independent, *_ = clusters.statistics(accepted, K)
    assert tokens == pytest.approx(2.5, abs=0.1) and independent != pytest.approx(tokens, abs=0.1)
