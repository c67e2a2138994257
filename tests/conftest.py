"""Settings and fixtures of the whole suite."""

import os
from collections.abc import Iterator

import jaxtyping
import pytest
from hypothesis import HealthCheck, settings

# The same examples on every run, so that a red build is red for everyone. CINETILE_FUZZ=1 looks
# for new ones.
_SHARED = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("ci", derandomize=True, database=None, max_examples=60, **_SHARED)
settings.register_profile("fuzz", max_examples=1000, **_SHARED)
settings.load_profile("fuzz" if os.environ.get("CINETILE_FUZZ") else "ci")


def pytest_configure(config: pytest.Config) -> None:
    # beartype checks one random item of a sequence, also where a strategy builds a mask.
    config.addinivalue_line(
        "filterwarnings",
        "ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning",
    )


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switches off the checks of annotations that only tests have.

    What a user meets on bad input is the library's own error, not jaxtyping's.
    """
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
