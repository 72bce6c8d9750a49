"""Launchers: jobs that provide hosts. ``monarch_kernel.job`` exports their public names."""
