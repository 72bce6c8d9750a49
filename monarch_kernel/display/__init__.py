"""What every view of ours shares, in terminals and in notebooks: tables as plain data, and the styles of all HTML.

It imports nothing of ours, so the kernel, the debugger, widgets and the server may all build on it.
"""
