"""Eight virtual processors as devices: `make test-devices` sets their number before jax starts."""

import jax
import pytest

DEVICES = 8


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/devices/" in item.path.as_posix()]
    if here and len(jax.devices()) < DEVICES:
        for item in here:
            item.add_marker(pytest.mark.skip(reason="needs eight devices: make test-devices"))
