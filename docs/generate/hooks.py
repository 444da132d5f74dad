"""What mkdocs calls while it builds the site: pages made from the code are added, and mathematics becomes MathML."""

import html
import json
import posixpath
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import command_page  # noqa: E402
import python_pages  # noqa: E402
import residual_pages  # noqa: E402
from mathematics import mathml  # noqa: E402

import headwater  # noqa: E402
from headwater.cli.flags import InspectFlags  # noqa: E402
from headwater.residuals import entry, names  # noqa: E402
from headwater.train import load_run  # noqa: E402

SET = re.compile(r'<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.DOTALL)
PAGES: dict[str, str] = {}  # by address in the site, made once a build
ROOT = Path(__file__).parents[2]
FIGURES = "studies/*/figure.svg"  # pictures that stand beside what drew them
CODE = re.compile(r"\]\((?:\.\./)+((?:headwater|examples)/[\w/]+\.(?:py|ipynb))")
NOTEBOOK = "examples/first_look.ipynb"
# The home page has the inspector itself in place of its picture, which a code host shows.
PAIR = "assets/demo-pair.html"
PICTURE = re.compile(r'<div class="front" markdown>.*?</div>', re.DOTALL)
FRAME = f'''<div class="front" markdown>
<iframe src="{PAIR}" title="The inspector on two models" scrolling="no"></iframe>

[![The inspector on two models](assets/inspector-phone.png)]({PAIR})

[Open it in a page of its own]({PAIR})

</div>'''
SOUGHT = ("start/", "guides/", "reference/words")
UNSOUGHT = ("results/log.md", "results/study-tables.md")
# A font of ziamath's, since few systems have one that can set mathematics.
FONT = "fonts/STIXTwoMath-Regular.ttf"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the pages, and put them into the navigation where mkdocs.yml leaves room for them."""
    PAGES.clear()
    PAGES.update(
        {
            **residual_pages.pages(),
            **python_pages.pages(),
            "reference/commands.md": command_page.page(),
            **notebook(),
        }
    )
    rooms = [name for name in PAGES if name.startswith("reference/python/")]
    own = [{name: f"reference/residuals/{name}.md"} for name in names()]
    fill(config.nav, {"Residuals": own, "Python": rooms})
    return config


def notebook() -> dict[str, str]:
    """Write the cells of the notebook and what they print as a page, and its pictures as files."""
    parts, pictures = [], {}
    for cell in json.loads((ROOT / NOTEBOOK).read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```py\n{source}\n```" if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", []):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text'])}```")
                continue
            name = f"first-look-{len(pictures)}.svg"
            pictures[f"start/{name}"] = "".join(output["data"]["image/svg+xml"])
            parts.append(f"![Picture that the cell above draws]({name})")
    parts.append(f"[This is the page](../{PAIR}). The notebook itself is `{NOTEBOOK}`.\n")
    return {"start/first-look.md": "\n\n".join(parts), **pictures}


def pair_page() -> str:
    """Look into the two models that come with the package, as `headwater inspect demo` does."""
    looks = []
    for name, folder in (("standard", "demo/standard"), ("attnres-block", "demo")):
        model, tokenizer, _ = load_run(folder)
        tokens = tokenizer.encode(InspectFlags.prompt).tolist()
        looks.append(headwater.inspect(model, tokens, tokenizer=tokenizer, name=name))
    return looks[0].to_html(looks[1])


def fill(nav: Any, added: dict[str, list[Any]]) -> None:
    """Append to the named sections, however deep they lie."""
    for item in nav:
        for title, inside in item.items() if isinstance(item, dict) else ():
            if isinstance(inside, list):
                inside.extend(added.get(title, []))
                fill(inside, added)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for address, content in {**PAGES, PAIR: pair_page()}.items():
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


def code_pages() -> dict[str, str]:
    """Map files of the code to the page that is made from each."""
    pages = {}
    for name in reversed(names()):
        module = entry(name).build.__module__
        pages[f"{module.replace('.', '/')}.py"] = f"reference/residuals/{name}.md"
    return pages | {
        "headwater/residuals/__init__.py": "reference/residuals/index.md",
        "headwater/ops/__init__.py": "reference/operators.md",
        "headwater/cli/__init__.py": "reference/commands.md",
        "headwater/train/__init__.py": "reference/python/train.md",
        NOTEBOOK: "start/first-look.md",
    }


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Show search the pages that people look for first; point links to code to its page, and
    figures of studies to their copies. So links lead somewhere on a code host too."""
    address = page.file.src_uri
    if address == "guides/troubleshooting.md":
        page.meta["search"] = {"boost": 12}
    elif address.startswith(SOUGHT):
        page.meta["search"] = {"boost": 4}
    elif address in UNSOUGHT:
        page.meta["search"] = {"exclude": True}
    if address == "index.md":
        markdown = PICTURE.sub(FRAME, markdown)
    pages, here = code_pages(), posixpath.dirname(address)
    markdown = CODE.sub(lambda m: f"]({posixpath.relpath(pages[m[1]], here)}", markdown)
    return markdown.replace("](../../studies/", "](../studies/")


def on_page_content(content: str, **_: Any) -> str:
    return SET.sub(lambda m: mathml(html.unescape(m[2]).strip(), block=m[1] == "div"), content)
