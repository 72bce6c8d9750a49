"""The debugger of a controller: breakpoints, stops and viewers (`hub`), and queries to all ranks of a mesh (`query`).

Ranks import `hub_actor` to call it, so this module loads nothing.
"""
