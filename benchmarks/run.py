"""List what each script in this folder shows, or run one of them.

python benchmarks/run.py                           # the list
python benchmarks/run.py measure_engine turn       # python benchmarks/measure_engine.py turn
python benchmarks/run.py measure_engine --help
"""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
MAIN = 'if __name__ == "__main__":'


def scripts() -> dict[str, str]:
    """The first sentence of each script's docstring, by the script's name.

    A module without a main program is no script. ``proof_bits`` is a part of ``proof``, which starts it.
    """
    found = {
        path.stem: path.read_text(encoding="utf-8") for path in sorted(HERE.glob("*.py")) if path != Path(__file__)
    }
    found = {name: source for name, source in found.items() if MAIN in source}
    return {
        name: (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].replace("\n", " ")
        for name, source in found.items()
        if not any(name.startswith(f"{other}_") for other in found)
    }


def listing() -> str:
    """A paragraph for each script."""
    known = scripts()
    width = max(map(len, known)) + 2
    return "\n".join(
        textwrap.fill(name.ljust(width) + text, 120, subsequent_indent=" " * width) for name, text in known.items()
    )


def main() -> int:
    """Print the list, or run the named script with the arguments behind its name; returns its exit status."""
    if len(sys.argv) == 1 or sys.argv[1] in ("-h", "--help"):
        print(__doc__.strip(), listing(), sep="\n\n")
        return 0
    name, arguments = sys.argv[1].removesuffix(".py"), sys.argv[2:]
    if name not in scripts():
        print(f"there is no script {name}; python benchmarks/run.py lists them", file=sys.stderr)
        return 2
    return subprocess.call([sys.executable, str(HERE / f"{name}.py"), *arguments])


if __name__ == "__main__":
    sys.exit(main())
