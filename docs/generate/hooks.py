"""What mkdocs calls while it builds the site: pages made from the code are added, and mathematics becomes MathML."""

import html
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import command_page  # noqa: E402
import python_pages  # noqa: E402
import residual_pages  # noqa: E402
from mathematics import mathml  # noqa: E402

from headwater.residuals import names  # noqa: E402

SET = re.compile(r'<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.DOTALL)
PAGES: dict[str, str] = {}  # by address in the site, made once a build
ROOT = Path(__file__).parents[2]
FIGURES = "studies/*/figure.svg"  # pictures that stand beside what drew them
FONT = (
    "fonts/STIXTwoMath-Regular.ttf"  # of ziamath; few systems have a font that can set mathematics
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the pages, and put them into the navigation where mkdocs.yml leaves room for them."""
    PAGES.clear()
    PAGES.update(
        {
            **residual_pages.pages(),
            **python_pages.pages(),
            "reference/commands.md": command_page.page(),
        }
    )
    rooms = [name for name in PAGES if name.startswith("reference/python/")]
    own = [{name: f"reference/residuals/{name}.md"} for name in names()]
    fill(config.nav, {"Residuals": own, "Python": rooms})
    return config


def fill(nav: Any, added: dict[str, list[Any]]) -> None:
    """Append to the named sections, however deep they lie."""
    for item in nav:
        for title, inside in item.items() if isinstance(item, dict) else ():
            if isinstance(inside, list):
                inside.extend(added.get(title, []))
                fill(inside, added)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for address, content in PAGES.items():
        files.append(File.generated(config, address, content=content))
    # Where it is, without importing it
    (ziamath,) = find_spec("ziamath").submodule_search_locations
    files.append(
        File.generated(
            config, "assets/mathematics.ttf", content=(Path(ziamath) / FONT).read_bytes()
        )
    )
    for figure in ROOT.glob(FIGURES):
        files.append(
            File.generated(config, figure.relative_to(ROOT).as_posix(), content=figure.read_bytes())
        )
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace("](../../studies/", "](../studies/")


def on_page_content(content: str, **_: Any) -> str:
    return SET.sub(lambda m: mathml(html.unescape(m[2]).strip(), block=m[1] == "div"), content)
