"""A service that all tests of a module share."""

import pytest

from support.services import make_service


@pytest.fixture(scope="module")
def service():
    made = make_service()
    made.start()
    yield made
    made.close()
    made.join()
