"""How Sphinx makes pages of these files: ``sphinx-build -W docs build/docs``."""

project = "wheelmount"
extensions = ["myst_parser"]
myst_heading_anchors = 3  # as GitHub makes them: links work in both places
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "show_powered_by": False}
html_show_copyright = False
