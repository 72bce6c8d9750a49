"""The commands of ``monarch-kernel``: their options, and what they print. ``monarch_kernel.__main__`` lists them.

Each module is imported only when its command is given. It imports what the command runs only where it runs it, so that
``--help`` and the parsing of options cost nothing.
"""
