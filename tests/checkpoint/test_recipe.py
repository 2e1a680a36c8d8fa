"""Recipes decide for each tensor, and mistakes in them are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from bminf_lite.checkpoint.recipe import Recipe, Scheme, built_in_recipes, load_recipe, parse_recipe
from bminf_lite.errors import UsageError

CALIBRATED = 'linear = "w8a8"\nhead = "w8a8"\n[calibration]\n'
EXAMPLES = Path(__file__).parents[2] / "configs" / "recipes"


@pytest.mark.parametrize("name", [*built_in_recipes(), *sorted(EXAMPLES.glob("*.toml"))], ids=lambda x: Path(x).stem)
def test_built_in_recipes_and_examples_are_valid(name: str | Path) -> None:
    recipe = load_recipe(name)
    assert recipe.name == Path(name).stem and recipe.description
    assert load_recipe(str(name)) == recipe and load_recipe(recipe) is recipe


def test_the_first_pattern_that_matches_decides() -> None:
    recipe = parse_recipe(
        'linear = "w8a8"\nhead = "float"\n[rules]\n"a.*" = "w8a16"\n"*.weight" = "float"\n"a.b" = "w8a8"', "x/mine.toml"
    )
    assert recipe.name == "mine"
    assert recipe.scheme_of("a.b") is Scheme.W8A16
    assert recipe.scheme_of("c.weight") is Scheme.FLOAT
    assert recipe.scheme_of("c.b") is Scheme.W8A8
    assert recipe.scheme_of("head", is_head=True) is Scheme.FLOAT
    assert recipe.scheme_of("a.head", is_head=True) is Scheme.W8A16
    assert recipe.to_dict()["rules"] == {"a.*": "w8a16", "*.weight": "float", "a.b": "w8a8"}


def test_patterns_that_match_nothing() -> None:
    recipe = Recipe("mine", Scheme.W8A8, Scheme.W8A8, {"a.*": Scheme.FLOAT, "b.*": Scheme.FLOAT, "c": Scheme.FLOAT})
    with pytest.raises(UsageError, match=r"matches 'b\.\*', 'c'.*such as 'a\.weight'"):
        recipe.check_patterns(["a.weight"])


@pytest.mark.parametrize(
    "text, expected",
    [
        ("linear =", ["not valid TOML"]),
        ("", ["head is missing", "linear is missing"]),
        ('linear = "w8a8"\nhead = "int4"', ["head is 'int4', not one of w8a8, w8a16, float"]),
        ('linear = ["w8a8"]\nhead = 8', ["linear is ['w8a8']", "head is 8"]),
        ('linear = "w8a8"\nhead = "w8a8"\nlinaer = "float"', ["unknown key 'linaer'"]),
        ('linear = "w8a8"\nhead = "w8a8"\nrules = "x"', ["rules must be a table"]),
        ('linear = "w8a8"\nhead = "w8a8"\nname = 1', ["name must be text, not 1"]),
        ('linear = "w8a8"\nhead = "w8a8"\n[rules]\n"a*" = "no"\nb.c = 1', ["rules.a* is 'no'", "rules.b is {'c': 1}"]),
        ('linear = "w8a8"\nhead = "w8a8"\nrotation = 48', ["rotation is 48, not a power of two from 1 to 256"]),
        ('linear = "w8a8"\nhead = "w8a8"\nrotation = true', ["rotation is True, not a power of two"]),
        ('linear = "w8a8"\nhead = "w8a8"\nrotation = "64"', ["rotation must be a whole number, not '64'"]),
        (
            'linear = "w8a8"\nhead = "w8a8"\nrotated_inputs = "some"',
            ["rotated_inputs is 'some', not one of feed-forward"],
        ),
        (
            'linear = "w8a8"\nhead = "w8a8"\noffline_rotation = true\nrotated_inputs = "all"',
            ["rotates what offline_rotation rotates"],
        ),
        (CALIBRATED + "outlier_columns = 4", ["needs calibration.max_error"]),
        (CALIBRATED + "outlier_columns = -1", ["not a whole number from 0 to 256"]),
        (
            CALIBRATED + "max_error = 2\nmax_eror = 0.1",
            ["not a number from 0 to 1", "unknown key 'calibration.max_eror'"],
        ),
        (CALIBRATED + 'smoothing = "yes"', ["not true or false"]),
    ],
)
def test_mistakes_are_all_told(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_recipe(path)
    assert all(part in str(caught.value) for part in [str(path), *expected])


def test_unknown_and_unreadable_recipes(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"'int4' is neither built in \(auto, w8a16, w8a8, w8a8-rotate, w8a8-rotate-all, w8a8-smooth\) nor a file",
    ):
        load_recipe("int4")
    (tmp_path / "x.toml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="cannot be read"):
        load_recipe(tmp_path / "x.toml")
