"""The documents say what is true: README's example runs, commands and options exist, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import click
import make_model_table
import pytest
import tiny_checkpoint

import bminf_lite
from bminf_lite import backend
from bminf_lite.cli import main

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    create = backend.create
    monkeypatch.setattr(backend, "create", lambda *_: create("cpu"))
    monkeypatch.chdir(tmp_path)
    tiny_checkpoint.write(tmp_path / "bminf_lite" / "demo_model")
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_commands_and_options_exist() -> None:
    names = set(main.list_commands(click.Context(main)))
    table = (REPOSITORY / "docs" / "commands.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `bminf-lite ([a-z-]+)", table, re.MULTILINE)) == names
    commands = [main.get_command(click.Context(main), name) for name in names]
    options = {opt for c in commands if c for p in c.params for opt in (*p.opts, *p.secondary_opts)} | {"--help"}
    pages = [REPOSITORY / page for page in PAGES if "/dev/" not in page]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"(?:`|^    )bminf-lite ([a-z-]+)", text, re.MULTILINE)) <= names, page
        assert set(re.findall(r"`(--[a-z-]+)", text)) <= options | {"--fake-gpu", "--fake-gpu-ptx"}, page
        for line in re.findall(r"^    (bminf-lite .*)$", text, re.MULTILINE):
            assert set(re.findall(r"(?<= )--[a-z-]+", line)) <= options, page


def test_the_table_of_models_is_current() -> None:
    page = make_model_table.PAGE.read_text(encoding="utf-8")
    assert make_model_table.with_table(page) == page, "run: python tools/make_model_table.py"


def test_the_reference_has_every_public_name() -> None:
    reference = (REPOSITORY / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    described = re.findall(r"^\.\. (?:autofunction|autoclass|autoexception|py:data):: (\w+)$", reference, re.MULTILINE)
    assert sorted(described) == sorted(bminf_lite.__all__)


def test_no_page_of_the_site_names_a_commit() -> None:
    for page in PAGES:
        if "docs/dev/" not in page:
            text = (REPOSITORY / page).read_text(encoding="utf-8")
            assert re.findall(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7,40}\b", text) == [], page


def test_what_int8_costs_is_one_table() -> None:
    """The losses of real models are those of the page about quantization."""
    rows = re.findall(r"^\|.*\|$", README, re.MULTILINE)
    page = (REPOSITORY / "docs" / "quantization.md").read_text(encoding="utf-8").splitlines()
    assert len(rows) >= 5 and set(rows) <= set(page)


def test_the_version_stands_once() -> None:
    version = f'"{bminf_lite.__version__}"'
    texts = {path: path.read_text(encoding="utf-8") for path in (REPOSITORY / "bminf_lite").rglob("*.py")}
    assert [path.name for path, text in texts.items() if version in text] == ["version.py"]
    assert version not in (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert f"## {bminf_lite.__version__}" in (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "examples/README.md",
    *sorted(
        str(page.relative_to(REPOSITORY)) for page in (REPOSITORY / "docs").rglob("*.md") if "_pages" not in page.parts
    ),
]


@pytest.mark.parametrize("page", [*PAGES, "benchmarks/README.md", "tests/fake_gpu/README.md"])
def test_links_and_paths_exist(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    folder = (REPOSITORY / page).parent
    links = [folder / link for link in re.findall(r"\]\((?!https?:)([^)#]+)", text)]
    paths = [
        REPOSITORY / path
        for path in re.findall(r"`((?:bminf_lite|tests|tools|docs|benchmarks|examples)/[\w./]+)`", text)
    ]
    assert [str(path) for path in links + paths if not path.exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_sections_that_a_page_refers_to_exist(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    sections = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= sections
