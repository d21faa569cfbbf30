"""How Sphinx makes pages of these files: ``sphinx-build -W docs build/docs``."""

project = "wheelmount"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
python_maximum_signature_line_length = 60
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3  # as GitHub makes them: links work in both places
copybutton_prompt_text = "$ "  # of a console only what is typed
copybutton_only_copy_prompt_lines = True
copybutton_here_doc_delimiter = "EOF"
html_theme = "furo"
html_title = "wheelmount"
html_static_path = ["static"]
html_css_files = ["wheelmount.css"]
html_show_copyright = False
html_show_sphinx = False
