"""The value that `headwater.inspect` returns: a forward pass that writes its own page."""

from dataclasses import dataclass
from html import escape
from pathlib import Path

from headwater.analyze.report import write_page
from headwater.folders import at_home

from .forward_pass import ForwardPass
from .page import make_page


@dataclass(frozen=True, kw_only=True)
class Inspection(ForwardPass):
    """One forward pass of a model over T tokens, by depth: what `headwater.inspect` returns.

        inspection = headwater.inspect(model, tokens)
        print(inspection.mixing[-1].mean(-1))  # shares of the output head, averaged over tokens
        inspection.save("inspect.html")

    Its fields are those of [ForwardPass][headwater.analyze.inspector.forward_pass.ForwardPass].
    """

    def __repr__(self) -> str:
        """One line: a prompt would print as a thousand lines of numbers."""
        sizes = f"{len(self.tokens)} tokens, {len(self.kinds) + 1} reads"
        return f"<Inspection of {self.name}: {sizes}; .save('inspect.html') writes its page>"

    def to_html(self, other: "Inspection | None" = None) -> str:
        """Returns one HTML page that needs no network; with `other`, of the same tokens, both
        models side by side.

        Raises UserError if the two have different tokens.
        """
        return make_page([self] if other is None else [self, other])

    def save(self, path: str | Path, other: "Inspection | None" = None) -> Path:
        """Write `to_html(other)` to a file, over an earlier page but nothing else.

        Returns the `path`.
        """
        return write_page(at_home(path), self.to_html(other))

    def _repr_html_(self) -> str:
        """Show the page in a frame of a notebook, whose scripts reach nothing outside it."""
        frame = 'sandbox="allow-scripts allow-downloads" style="width:100%;height:820px;border:0"'
        page = escape(self.to_html(), quote=True)
        return f'<iframe title="headwater inspect" {frame} srcdoc="{page}"></iframe>'
