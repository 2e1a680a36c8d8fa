"""The README says what is true: its Python example runs, its commands and options exist, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import click
import make_model_table
import pytest
import tiny_checkpoint

from bminf_lite import backend, models
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
    tiny_checkpoint.write(tmp_path / "Llama-3.2-1B")
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_commands_and_options_exist() -> None:
    commands = {name: main.get_command(click.Context(main), name) for name in main.list_commands(click.Context(main))}
    assert set(re.findall(r"bminf-lite ([a-z-]+)", README)) == set(commands)
    options = {opt for c in commands.values() if c for p in c.params for opt in p.opts} | {"--help"}
    assert set(re.findall(r"`(--[a-z-]+)", README)) <= options


def test_the_table_of_models_is_current() -> None:
    assert make_model_table.with_table(README) == README, "run: python tools/make_model_table.py"


def test_every_architecture_is_listed() -> None:
    assert re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE) == ["model_type", *models.names()]


PAGES = ["README.md", *sorted(str(page.relative_to(REPOSITORY)) for page in (REPOSITORY / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_exist(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    folder = (REPOSITORY / page).parent
    links = [folder / link for link in re.findall(r"\]\(([^):#]+)", text)]
    paths = [REPOSITORY / path for path in re.findall(r"`((?:bminf_lite|tests|tools|docs)/[\w./]+)`", text)]
    assert [str(path) for path in links + paths if not path.exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_sections_that_a_page_refers_to_exist(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    sections = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= sections
