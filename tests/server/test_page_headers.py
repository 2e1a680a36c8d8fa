"""How the chat page is served; test_page.py opens it in a browser."""

from __future__ import annotations

import re

from api_kit import LiveServer


def test_the_page_needs_nothing_else_and_allows_nothing_else(fake: LiveServer) -> None:
    response = fake.http.get("/")
    assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r'(src|href)="(?!data:)', response.text), "no external resource"
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy and "*" not in policy
    assert policy.count("'sha256-") == 2, "the script and the style of the file"


def test_browsers_keep_the_page_until_it_changes(fake: LiveServer) -> None:
    tag = fake.http.get("/").headers["etag"]
    again = fake.http.get("/", headers={"If-None-Match": tag})
    assert again.status_code == 304 and again.content == b""
    assert fake.http.get("/", headers={"If-None-Match": '"another"'}).status_code == 200
