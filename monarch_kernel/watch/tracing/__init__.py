"""Trace all processes into a file for ui.perfetto.dev and chrome://tracing.

``clocks`` relates the clocks of ranks to that of the controller. ``chrome_trace`` assigns records to lanes without
overlaps and writes the file. ``trace`` turns recording on, collects the records and turns recording off.
"""
