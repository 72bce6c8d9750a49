"""The commands of ``monarch-kernel``: their options and output. ``monarch_kernel.__main__`` lists them.

Each module is imported only when its command is called. The module imports the code that it needs when it runs the
command, so that ``--help`` and option parsing stay fast.
"""
