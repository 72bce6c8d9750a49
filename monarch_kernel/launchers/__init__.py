"""Launchers: jobs that provide hosts. ``monarch_kernel.job`` has their public names."""
