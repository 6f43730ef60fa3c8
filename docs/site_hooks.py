"""Hooks of MkDocs: documents that live outside `docs/` become pages of the site, and links to them lead there.

Must not know: what any page says.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Path from the repository's root, which is also the page's path in the site.
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "benchmarks/RESULTS.md")
RESULTS = "benchmarks/results"
TARGETS = "benchmarks/serving/targets.toml"
_UP = re.compile(r"\]\(\.\./([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the documents outside, and the files of measurements that they link to."""
    measured = (f"{RESULTS}/{path.name}" for path in sorted((ROOT / RESULTS).iterdir()))
    for name in (*OUTSIDE, TARGETS, *measured):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A link from docs/ to a document outside is one from the site's root, as is one from there into docs/."""
    if page.file.src_uri in OUTSIDE:
        return markdown.replace("](docs/", "](").replace("](../docs/", "](../")
    return _UP.sub(lambda found: f"]({found[1]}" if found[1] in OUTSIDE else found[0], markdown)
