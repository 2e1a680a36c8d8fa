"""These tests need torch. Without it they are not collected; a stage of their own runs them in CI.

The folder is not named torch: pytest puts ``tests`` on the path, where a folder of that name would pass for the
library.
"""

import importlib.util

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("torch") is None else []
