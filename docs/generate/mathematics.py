"""Mathematics without a script: formulas of the code become LaTeX, LaTeX the MathML that browsers set."""

import re
from itertools import cycle

from latex2mathml.converter import convert as to_mathml

# Words that stand in formulas as functions or names; every other word of several letters is prose.
NAMES = (
    "RMSNorm",
    "softmax",
    "sigmoid",
    "Sinkhorn",
    "ReLU",
    "GELU",
    "SiLU",
    "MLP",
    "diag",
    "exp",
    "vec",
    "attention",
)
SOME = r"(?:[a-z]{2,}|a(?= [a-z]{2}))"  # a word of prose
PROSE = re.compile(rf"(?<![A-Za-z\\{{]){SOME}(?:,? {SOME})*(?![A-Za-z}}_^])")
INDEXED = re.compile(r"(?<![A-Za-z\\])([A-Za-z])(\d|_([a-z0-9]{1,2})(?![A-Za-z{]))")
LATEX = (
    (r"\((\d+)/(\d+)\)", r"{\1/\2}"),  # an exponent, not a pair
    (r"sqrt\((\w+)\)", r"\\sqrt{\1}"),
    (r"\|([^|]+)\|", r"\\lVert \1 \\rVert"),
    (r"<([^<>]+)>", r"\\langle \1 \\rangle "),
    (r"\.\.\.", r"\\dots "),
    (r"\bsum_", r"\\sum_"),
    (r"\^T\b", r"^\\top "),
)
NAMED = re.compile(
    r"(&#x00029;</mo>|<[^>]*>)<mo>([A-Za-z]{2,})</mo>(<mo stretchy=\"false\">&#x00028;|</mrow>)?"
)
THIN = '<mspace width="0.17em"></mspace>'


def typeset(formula: str) -> str:
    """A formula as the registry has it, `a = b, in words;  c = d: in words.`, as Markdown: each equation on a line of
    its own, words below it."""
    symbols, _, words = formula.rstrip(".").partition(": ")
    lines = [_clause(latex(clause.strip(" ,"))) for clause in re.split(r";\s+|,\s{2,}", symbols)]
    return "\n\n".join([*lines, *([f"{words}."] if words else [])])


def symbols(formula: str) -> list[str]:
    """LaTeX of the equations of a formula, without the words."""
    return [
        part.strip()[2:].partition("$$")[0].strip()
        for part in typeset(formula).split("\n\n")
        if part[:2] == "$$"
    ]


def _clause(source: str) -> str:
    equation, begins, rest = source.partition(r"\text{ ")
    # Mathematics and prose change places
    remark = re.sub(r"\\text\{ (.*?) \}", r"$ \1 $", begins + rest)
    pieces = [piece.strip() for piece in remark.split("$")][1:]
    texts = [
        piece if i % 2 == 0 else re.sub(r"^(.*?)([,]?)$", r"$\1$\2", piece)
        for i, piece in enumerate(pieces)
    ]
    words = " ".join(text for text in texts if text.strip("$"))
    return f"$$\n{equation.strip(' ,')}\n$$" + (f"\n\n{words}." if words else "")


def latex(text: str) -> str:
    """`h_{i+1} = h_i + f_i(h_i)` as LaTeX: names upright, indices lowered, words as text."""
    for pattern, replacement in LATEX:
        text = re.sub(pattern, replacement, text)
    text = INDEXED.sub(lambda m: f"{m[1]}_{{{m[3] or m[2]}}}", text)
    pieces = re.split(r"(\\[a-zA-Z]+|\{[^{}]*\})", text)  # commands and groups stay as they are
    return "".join(piece if piece.startswith(("\\", "{")) else _words(piece) for piece in pieces)


def _words(text: str) -> str:
    """Names become operators; words of prose, with what joins them, become text."""
    for name in NAMES:
        text = re.sub(rf"(?<![A-Za-z]){name}(?![A-Za-z])", rf"\\operatorname{{{name}}} ", text)
    return PROSE.sub(lambda m: rf"\text{{ {m[0]} }}", text)


def mathml(source: str, *, block: bool = False) -> str:
    """LaTeX as a MathML element; `block` for a line of its own."""
    made = to_mathml(source, display="block" if block else "inline")
    made = NAMED.sub(_name, made)
    bars = (
        f'<mo form="{form}" stretchy="false">&#x02016;</mo>'
        for form in cycle(("prefix", "postfix"))
    )
    return re.sub(r"<mo>&#x02016;</mo>", lambda _: next(bars), made)


def _name(match: re.Match[str]) -> str:
    """The name of a function as the word it is: an operator would have space on both sides, before its brackets too."""
    before, name, after = match.groups()
    factor = before.startswith(("</mi", "</mn", "</ms", "&"))
    argument = before not in ("<msub>", "<msup>") and not after
    return f"{before}{THIN * factor}<mi>{name}</mi>{THIN * argument}{after or ''}"
