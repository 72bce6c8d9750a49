"""Copy environments (conda, venv, uv) to hosts as their installers would have created them there.

Nothing in this package needs actors. ``environment_manifest`` reads an environment at the client, ``check_compatible``
refuses hosts on which it cannot run, and ``Rewriter`` puts a host's prefix into its files.
"""
