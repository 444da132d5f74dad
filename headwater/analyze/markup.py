"""Values as text of a page. Whatever comes from a run goes through `text`, which escapes it."""

from collections.abc import Sequence
from html import escape

UNITS = ((" T", 1e12), (" B", 1e9), (" M", 1e6), (" k", 1e3))


def text(value: object) -> str:
    return escape(str(value))


def paragraphs(kind: str, sentences: list[str]) -> str:
    """Write a paragraph for each sentence. No line ends between a number and its per cent sign."""
    lines = []
    for sentence in sentences:
        words = text(sentence).replace(" %", "\u00a0%")
        lines.append(f'<p class="{kind}">{words}</p>')
    return "\n".join(lines)


def listing(kind: str, sentences: list[str], limit: int = 12) -> str:
    """Write a list of sentences, each of them once; nothing if there are none."""
    if not sentences:
        return ""
    items = list(dict.fromkeys(sentences))
    lines = [f"<li>{text(item)}</li>" for item in items[:limit]]
    if len(items) > limit:
        lines.append(f"<li>… and {len(items) - limit} more.</li>")
    return f'<ul class="{kind}">{"".join(lines)}</ul>'


def definitions(rows: dict[str, str]) -> str:
    lines = []
    for name, value in rows.items():
        lines.append(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>")
    return "".join(lines)


def breakable(name: str) -> str:
    """Let lines break between the options of a residual, rather than inside a word."""
    return text(name).replace(":", ":<wbr>").replace(",", ",<wbr>")


def join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def unique(values: Sequence[str], limit: int) -> list[str]:
    """List different values in their order, at most `limit` of them."""
    different = list(dict.fromkeys(values))
    return different[:limit] + ["…"] * (len(different) > limit)


def count(value: float | None) -> str:
    """Write a number to three digits with its unit: 12.3 k."""
    if value is None:
        return "—"
    for unit, size in UNITS:
        if abs(value) >= size:
            # Three digits of 999.9 would be 1e+03.
            form = ".3g" if abs(value) < 999.5 * size else ".0f"
            return f"{value / size:{form}}{unit}"
    return f"{value:.0f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "—"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def memory(size: float | None) -> str:
    if size is None:
        return "—"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
