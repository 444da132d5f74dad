"""Rules of CONTRIBUTING.md about words, over pages, docstrings, help texts and messages."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
CODE = sorted(ROOT.glob("headwater/**/*.py"))
RIDDLE = re.compile(r"(Of|What|Whether|Where|How|Which) ")
WORDS = re.compile(
    r"told apart|half with half|(is|are|was|be) worth|ends? (lower|higher|above|below|level)\b|"
    r"hangs? on\b|to the letter|outputs in effect|told of\b",
    re.IGNORECASE,
)
IN_PAGES = re.compile(r"\b(?:arms?|Arms)\b|(?:^|[.:] )Of (?!course)", re.MULTILINE)
NOT_PROSE = re.compile(r"```.*?```|`[^`]*`|<!--.*?-->|\]\([^)]*\)", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_no_word_of_the_list(page):
    prose = NOT_PROSE.sub("", page.read_text(encoding="utf-8"))
    for pattern in (WORDS, IN_PAGES):
        assert not [match[0] for match in pattern.finditer(prose)]


def test_texts_of_the_code_name_things_and_use_no_word_of_the_list():
    faults = []
    for file in CODE:
        nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
        strings = [node.value for node in nodes if isinstance(node, ast.Constant)]
        faults += [text for text in strings if isinstance(text, str) and WORDS.search(text)]
        expressions = [node.value for node in nodes if isinstance(node, ast.Expr)]
        texts = [node.value for node in expressions if isinstance(node, ast.Constant)]
        faults += [text for text in texts if RIDDLE.match(str(text).strip())]
    assert not faults
