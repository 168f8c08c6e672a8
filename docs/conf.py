"""How sphinx builds the pages: Markdown by myst, docstrings by autodoc, theme furo."""

from __future__ import annotations

from importlib.metadata import version as installed_version

project = "hyper-dcp"
author = "The hyper-dcp authors"
copyright = author
version = release = installed_version("hyper-dcp")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "examples"]
suppress_warnings = ["toc.empty_glob"]  # a section may wait for its first page
nitpicky = False

autodoc_mock_imports = ["torch", "mindspore"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
add_module_names = False
default_role = "code"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"hyper-dcp {release}"
