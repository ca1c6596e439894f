"""Sphinx configuration of the site. `build.py` stages the pages and the notebooks, then calls Sphinx with this file.

Nothing is executed here, and nothing is loaded from another host: the pages read the same without a network.
"""

project = "porting-kit"
author = "The porting-kit authors"
copyright = "The porting-kit authors"

extensions = ["myst_nb"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["README.md"]  # pages include parts of it
suppress_warnings = ["myst.header"]  # an included part starts at its own heading level

html_theme = "furo"
html_title = "porting-kit"
html_show_sourcelink = False
html_copy_source = False

nb_execution_mode = "off"
nb_merge_streams = True
# Widget managers would come from another host. Each widget in the notebooks has a static twin that is always shown.
nb_ipywidgets_js = {}
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_substitutions = {"outputs": ""}  # build.py says which run the outputs are from
