"""The site: ``sphinx-build -W docs build/site``, with the extra ``docs`` installed."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

from sphinx.application import Sphinx

import bminf_lite

DOCS = Path(__file__).parent
COPIED = {
    "examples": ("*.ipynb", "*.md", "*.py"),
    "examples/serving": ("*.*", "Containerfile"),
    ".": ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"),
}
"""Files outside of this folder that are pages of the site: copied into ``_pages``, which git ignores."""

project = "bminf-lite"
release = version = bminf_lite.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinxcontrib.mermaid",
]
html_theme = "furo"
html_title = f"bminf-lite {release}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["dev/*", "_pages/README.md"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
nb_execution_mode = "force"
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_execution_excludepatterns = [] if find_spec("torch") and find_spec("peft") else ["*lora_on_int8*"]
autodoc_mock_imports = [] if find_spec("torch") else ["torch"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
suppress_warnings = [
    "intersphinx.external",
    "mystnb.unknown_mime_type",
]
intersphinx_mapping: dict[str, tuple[str, None]] = {}


def copy_pages(_: Sphinx) -> None:
    """Copy the pages that stand elsewhere in the repository."""
    target = DOCS / "_pages"
    shutil.rmtree(target, ignore_errors=True)
    for folder, patterns in COPIED.items():
        (target / folder).mkdir(parents=True, exist_ok=True)
        for file in (file for pattern in patterns for file in (DOCS.parent / folder).glob(pattern)):
            shutil.copyfile(file, target / folder / file.name)


def link_within_site(_: Sphinx, __: str, source: list[str]) -> None:
    """Lead links of the repository to the site's pages, and those to ``docs/dev``, which has none, to its files."""
    text = re.sub(r"\]\(docs/", "](/", source[0])
    text = re.sub(r"\]\((?:\.\./)+(examples/|CONTRIBUTING\.md)", r"](/_pages/\1", text)
    source[0] = re.sub(r"\]\((?:\.\./)?(dev/[\w-]+\.md)(?:#[^)]*)?\)", r"](path:/\1)", text)


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", copy_pages)
    app.connect("source-read", link_within_site)
