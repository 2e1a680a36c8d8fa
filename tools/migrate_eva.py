"""``bminf-lite convert eva``, whose help lists the arguments."""

from __future__ import annotations

import sys

from bminf_lite.cli import main

if __name__ == "__main__":
    main(["convert", "eva", *sys.argv[1:]])
