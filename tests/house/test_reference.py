"""The pages in docs/reference are up to date, and every setting, field and option has a description."""

import re

import pytest

import kvcellar
from scripts.reference import FOLDER, described, examples, pages

PAGES = pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_up_to_date(name):
    assert (FOLDER / name).read_text() == PAGES[name], "run `make docs`"


def test_no_other_page_says_that_it_is_generated():
    assert {path.name for path in FOLDER.iterdir() if "*Generated from the code" in path.read_text()} == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_every_row_has_a_description(name):
    rows = re.findall(r"^\| `.*", PAGES[name], re.M)
    assert rows
    assert [row for row in rows if not row.split(" | ")[-1].strip(" |")] == []


def test_every_public_name_has_an_example_and_no_other_has():
    assert examples().keys() == set(kvcellar.__all__)


def test_a_comment_above_a_field_and_one_beside_it_describe_it():
    found = described(Example)
    assert found == {"beside": "on the line", "above": "two lines become one", "without": ""}


class Example:
    beside: int = 1  # on the line
    # two lines
    # become one
    above: int = 2
    without: int = 3
