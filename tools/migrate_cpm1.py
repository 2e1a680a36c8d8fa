"""``bminf-lite convert cpm-1``, whose help lists the arguments."""

from __future__ import annotations

import sys

from bminf_lite.cli import main

if __name__ == "__main__":
    main(["convert", "cpm-1", *sys.argv[1:]])
