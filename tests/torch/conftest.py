"""These tests need torch. Without it they are not collected; a stage of their own runs them in CI."""

import importlib.util

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("torch") is None else []
