"""The base of all views in terminals and notebooks: tables as plain data, and the styles of all HTML.

It imports no other package of this project, so the kernel, the debugger, widgets and the server may all use it.
"""
