"""The quantizations that a migration with a target tries, from the fastest to the most exact.

A product in w8a8 is fastest, and rotations in the weights cost no time. A rotation of an input takes a few percent of
its product's time, and float activations about double the time of a prompt. So rotations come before float activations,
and of those only the products with the largest errors get them, more with each step.
"""

from __future__ import annotations

from dataclasses import replace

from ..checkpoint.recipe import CalibrationSettings, Recipe, load_recipe

MAX_ERRORS = (1e-3, 3e-4, 1e-4)
"""A w8a8 product with a larger error than this becomes w8a16."""


def offline_part(recipe: Recipe) -> Recipe:
    """A recipe that rotates, with rotations in the weights alone, so that other readers open the result."""
    return replace(recipe, name=f"{recipe.name}, offline only", rotation=1, offline_rotation=True)


def budget_steps(offline_only: bool, rotates_offline: bool) -> list[Recipe]:
    """The recipes to try, the fastest first; with ``offline_only`` those whose result other readers open.

    ``rotates_offline`` says whether the model can be rotated in its weights.
    """
    smooth = CalibrationSettings(smoothing=True)
    plain = load_recipe("w8a8")
    steps = [plain, load_recipe("w8a8-smooth")]
    if rotates_offline:
        plain = offline_part(load_recipe("w8a8-rotate"))
        steps.append(plain)
    if not offline_only:
        plain = load_recipe("w8a8-rotate")
        steps += [plain, replace(plain, name="w8a8-rotate, smoothed", calibration=smooth)]
    for max_error in MAX_ERRORS:
        name = f"{plain.name}, w8a16 above an error of {max_error:g}"
        steps.append(replace(plain, name=name, calibration=replace(smooth, max_error=max_error)))
    return [*steps, load_recipe("w8a16")]
