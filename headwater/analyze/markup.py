"""Values as text of a page. Whatever comes from a run goes through `text`, which escapes it."""

from html import escape


def text(value: object) -> str:
    return escape(str(value))


def paragraphs(kind: str, sentences: list[str]) -> str:
    """No line ends between a number and its per cent sign."""
    bound = [text(sentence).replace(" %", "\u00a0%") for sentence in sentences]
    return "\n".join(f'<p class="{kind}">{words}</p>' for words in bound)


def listing(kind: str, sentences: list[str], limit: int = 12) -> str:
    if not sentences:
        return ""
    found = list(dict.fromkeys(sentences))
    rest = [f"… and {len(found) - limit} more."] if len(found) > limit else []
    return (
        f'<ul class="{kind}">'
        + "".join(f"<li>{text(s)}</li>" for s in found[:limit] + rest)
        + "</ul>"
    )


def definitions(rows: dict[str, str]) -> str:
    return "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in rows.items()
    )


def breakable(name: str) -> str:
    """A residual's options may be long: lines break between them rather than inside a word."""
    return text(name).replace(":", ":<wbr>").replace(",", ",<wbr>")


def join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def unique(values: list[str], limit: int) -> list[str]:
    found = list(dict.fromkeys(values))
    return found[:limit] + (["…"] if len(found) > limit else [])


def count(value: float | None) -> str:
    if value is None:
        return "—"
    for unit, size in ((" T", 1e12), (" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if abs(value) >= size:
            return (
                f"{value / size:.3g}{unit}"
                if abs(value) < 999.5 * size
                else f"{value / size:.0f}{unit}"
            )
    return f"{value:.0f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "—"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


def memory(size: float | None) -> str:
    if size is None:
        return "—"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
