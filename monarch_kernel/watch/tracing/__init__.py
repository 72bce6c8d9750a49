"""A trace of all processes: what each did and when, as a file that ui.perfetto.dev and chrome://tracing open.

``clocks`` relates the clocks of ranks to that of the controller, ``chrome_trace`` lays records out in lanes, where they
never overlap, and writes the file, and ``trace`` turns records on, collects them and turns them off.
"""
