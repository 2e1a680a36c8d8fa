"""``python -m bminf_lite`` is ``bminf-lite``."""

from .cli import main

main(prog_name="bminf-lite")
