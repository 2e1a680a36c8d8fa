"""Execute ``examples/what_int8_costs.ipynb``, and store its outputs in it. Needs the extra ``docs``.

python tools/make_notebook.py
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples" / "what_int8_costs.ipynb"


def main() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    for cell in notebook.cells:
        cell.metadata = {}  # the times of execution differ in every run
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
