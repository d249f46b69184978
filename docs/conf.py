"""Builds the documentation as a site: ``make docs``."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import site_pages  # noqa: E402 - it lies beside this file
from sphinx.application import Sphinx  # noqa: E402

from partsong import __version__  # noqa: E402

project = "partsong"
author = "The partsong authors"
project_copyright = "The partsong authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["notebooks"]
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath", "colon_fence"]

napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"partsong {release}"
html_copy_source = True
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [(None, {"body": site_pages.hub_names()}), "finder.js"]


def setup(app: Sphinx) -> None:
    """Has the pages that are not kept in docs/ written before the build, and llms.txt after it."""
    app.connect("builder-inited", lambda app: site_pages.write(Path(app.srcdir) / "_generated"))
    app.connect("source-read", site_pages.turn_links)
    app.connect("build-finished", site_pages.write_llms)
