"""These tests need torch; they are run by a stage of their own in CI."""

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
