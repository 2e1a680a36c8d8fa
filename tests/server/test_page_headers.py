"""How the chat page is served; test_page.py opens it in a browser."""

from __future__ import annotations

import re
from importlib.resources import files

from api_kit import LiveServer

from bminf_lite.server import page

FOLDER = files(page)
PUT_IN = re.findall(r"<(?:script|style)>([\w.]+)<", FOLDER.joinpath("index.html").read_text())
"""The names of the files that the document is made of."""


def test_the_page_needs_nothing_else_and_allows_nothing_else(fake: LiveServer) -> None:
    response = fake.http.get("/")
    assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
    markup = re.sub(r"<(script|style)>.*?</\1>", "", response.text, flags=re.DOTALL)
    assert not re.search(r'(src|href)="(?!data:)', markup), "no external resource"
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy and "*" not in policy
    assert policy.count("'sha256-") == len(PUT_IN) == 6, "the scripts and the style of the document"


def test_files_can_be_put_into_the_document() -> None:
    """Nothing in them ends their element early, and a browser changes no line end, with which the hash would differ."""
    for name in PUT_IN:
        content = FOLDER.joinpath(name).read_bytes()
        assert not re.search(rb"</(script|style)|<script[\s/>]|\r|\0", content, re.IGNORECASE), name


def test_the_licence_of_the_parser_is_beside_it() -> None:
    assert "MIT" in FOLDER.joinpath("marked.LICENSE.md").read_text()
    assert "marked v18.2.1" in FOLDER.joinpath("marked.umd.js").read_text()[:200]


def test_browsers_keep_the_page_until_it_changes(fake: LiveServer) -> None:
    tag = fake.http.get("/").headers["etag"]
    again = fake.http.get("/", headers={"If-None-Match": tag})
    assert again.status_code == 304 and again.content == b""
    assert fake.http.get("/", headers={"If-None-Match": '"another"'}).status_code == 200
