"""What a watch saw, kept for a while in a bounded store, and asked in SQL.

``columns`` holds the rows, ``tables`` says which tables there are, ``recorder`` turns changes of a watch into rows, and
``query`` asks. Tables have the names of Monarch's telemetry where it has such a table.
"""
