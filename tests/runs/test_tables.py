"""A table looks the same in a terminal, on a page, in Markdown and in plain text."""

import io

from rich.console import Console

from headwater.runs.tables import Cell, Table, html, markdown, plain, print_table, printable

TABLE = Table(
    ["name", Cell("loss", sortable=False)],
    [["a|b", Cell("1.5", detail="lowest", order=1.5, kind="best")], ["[c]", "<2>"]],
    title="Losses",
)


def printed(width: int) -> str:
    file = io.StringIO()
    print_table(TABLE, Console(file=file, width=width))
    return file.getvalue()


def test_markdown_escapes_bars():
    assert markdown(TABLE) == "| name | loss |\n| --- | --- |\n| a\\|b | 1.5 |\n| [c] | <2> |\n"


def test_plain_text_is_aligned():
    assert plain(TABLE) == "name  loss\na|b   1.5\n[c]   <2>"
    assert plain(Table(["", ""], [["a", "b"]])) == "a  b"


def test_html_escapes_text_and_has_what_its_script_sorts_by():
    page = html(TABLE)
    assert '<th scope="col" data-fixed>loss</th>' in page
    assert '<td class="best" data-value="1.5">1.5<small>lowest</small></td>' in page
    assert '<th scope="row">[c]</th><td>&lt;2&gt;</td>' in page
    drawing = Table(["x"], [[Cell("a", html="<svg/>")]])
    assert "<svg/>" in html(drawing)


def test_a_terminal_that_is_too_narrow_has_values_below_each_other():
    wide, narrow = printed(80), printed(12)
    assert "Losses" in wide
    assert any(line.split() == ["a|b", "1.5"] for line in wide.splitlines())
    assert "[c]" in wide, "brackets are no markup"
    assert any(line.split() == ["loss", "1.5"] for line in narrow.splitlines())


def test_a_terminal_obeys_no_name():
    """Escape codes would move the cursor; marks of direction turn the line around."""
    assert printable("a\tb\nc é") == "a\tb\nc é"
    hostile = Table(["name", "loss"], [["a\x1b[2J\r\u202eb", "\x9b1m"]])
    file = io.StringIO()
    print_table(hostile, Console(file=file, width=80))
    assert r"a\x1b[2J\r\u202eb" in file.getvalue()
    assert r"\x9b1m" in file.getvalue()
