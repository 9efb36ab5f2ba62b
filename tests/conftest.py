"""What all tests share."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """One option, for the tests whose worth grows with their length."""
    parser.addoption(
        "--thorough",
        action="store_true",
        help="let the tests that run for longer at will do so: make thorough",
    )


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether there is time."""
    return bool(request.config.getoption("--thorough"))
