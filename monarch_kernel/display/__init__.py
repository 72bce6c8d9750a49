"""Provide the base of all views in terminals and notebooks: tables as plain data, and the styles of all HTML.

It imports no other package of this project, so that the kernel, the debugger, widgets and the server can use it.
"""

#: The MIME type of a widget's view, for the manager of Jupyter's widgets.
VIEW_MIME = "application/vnd.jupyter.widget-view+json"
#: The same for the extension of JupyterLab, which shows the rest of that output if there is no live view.
OUTPUT_MIME = "application/vnd.monarch-kernel.view+json"
