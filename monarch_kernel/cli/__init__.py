"""The commands of ``monarch-kernel``: their options and their output. ``monarch_kernel.__main__`` lists them.

Each module is imported only when its command is called. It imports the code that the command runs only when it runs
it, so that ``--help`` and the parsing of options cost nothing.
"""
