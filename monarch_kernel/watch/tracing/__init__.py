"""A trace of all processes: what each did and when, as a file that ui.perfetto.dev and chrome://tracing open.

``clocks`` relates the clocks of ranks to that of the controller, ``lanes`` lays records out so that they never overlap,
``chrome_trace`` writes the file, and ``trace`` turns records on, collects them and turns them off.
"""
