"""These tests need PyTorch and diffusers; without them none is collected, and pytest says why."""

import importlib.util

import pytest

MISSING = [name for name in ("torch", "diffusers") if importlib.util.find_spec(name) is None]
if MISSING:
    pytest.skip(f"{' and '.join(MISSING)} not installed", allow_module_level=True)
