"""Reload live code: after a sync, imported modules follow their files, in one of three ways.

``sync_live`` syncs and refreshes, and ``watch`` does so at every save. The single steps are ``contact`` before a
switch, and ``stale_modules`` and ``refresh`` after it. ``refresh_here`` reloads the client's own modules;
``selection_of`` parses the modes of ``%autoreload``.
"""
