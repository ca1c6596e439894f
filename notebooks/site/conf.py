"""Sphinx configuration of the site. `build.py` stages the pages and the notebooks, then calls Sphinx with this file.

Nothing is executed here, and nothing is loaded from another host: the pages read the same without a network.
"""

project = "porting-kit"
author = "The porting-kit authors"
copyright = "The porting-kit authors"

extensions = ["myst_nb"]
smartquotes = False  # two hyphens before an option must stay two hyphens
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["README.md"]  # pages include parts of it
suppress_warnings = ["myst.header"]  # an included part starts at its own heading level

html_theme = "furo"
html_title = "porting-kit"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False

nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js = {}  # would come from another host; build.py drops the widgets, their static twins stay

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
