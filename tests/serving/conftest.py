"""A service that all tests of a module share."""

import pytest

from support.services import make_service, running


@pytest.fixture(scope="module")
def service():
    with running(make_service()) as made:
        yield made
