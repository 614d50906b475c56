"""The files of the pages: what others wrote is as their packages have it, and nothing parses a text as HTML or code."""

import hashlib
import re
from importlib.resources import files

import pytest

from kvcellar.inspector.routes import FILES, POLICY, read_files

STATIC = files("kvcellar.inspector").joinpath("static")
NOTICE = STATIC.joinpath("NOTICE").read_text()
LISTED = re.findall(r"^([0-9a-f]{64})  (\S+)  (\S+@[\d.]+) (\S+)  (.+)$", NOTICE, re.M)
OWN = [name for name in FILES if not name.startswith("vendor/") and name.endswith((".js", ".html", ".css"))]
UNSAFE = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerouslySetInnerHTML|DOMParser|createContextualFragment"
    r"|\beval\(|new Function|setTimeout\(['\"`]|javascript:|<style|\bstyle=\"|\son[a-z]+=\"|srcdoc"
)


def test_every_file_of_others_is_listed_with_its_digest_and_licence():
    assert sorted(f"vendor/{name}" for _, name, *_ in LISTED) == sorted(n for n in FILES if n.startswith("vendor/"))
    for digest, name, *_ in LISTED:
        assert hashlib.sha256(STATIC.joinpath("vendor", name).read_bytes()).hexdigest() == digest, name
    for licence in ("Apache License", "MIT License", "Permission to use, copy, modify, and/or distribute"):
        assert licence in NOTICE


def test_the_table_has_every_file_of_the_folder():
    found = [path.name for path in STATIC.iterdir() if path.is_file()]
    found += [f"{folder}/{path.name}" for folder in ("vendor", "chat") for path in STATIC.joinpath(folder).iterdir()]
    assert sorted(found) == sorted(FILES) == sorted(read_files())


@pytest.mark.parametrize("name", OWN)
def test_nothing_is_parsed_as_html_or_code_and_nothing_is_loaded_from_elsewhere(name):
    text = STATIC.joinpath(*name.split("/")).read_text()
    assert re.findall(UNSAFE, text) == []
    assert re.findall(r"https?://(?!www\.w3\.org/)\S+", text) == []


@pytest.mark.parametrize("name", [name for name in OWN if name.endswith((".js", ".html"))])
def test_what_is_loaded_is_in_the_table(name):
    text = STATIC.joinpath(*name.split("/")).read_text()
    for path in re.findall(r"[\"'`](/inspector/[\w./-]+\.\w+|/favicon\.ico)[\"'`]", text):
        assert path == "/favicon.ico" or path.removeprefix("/inspector/") in FILES, path


def test_the_policy_allows_no_code_of_the_page_itself():
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY
    for page in ("index.html", "chat/index.html"):
        assert not re.search(r"<script(?![^>]*\bsrc=)", STATIC.joinpath(*page.split("/")).read_text())
