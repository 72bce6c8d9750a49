"""A bounded store of what a watch has seen, which can be queried in SQL.

``columns`` stores the rows, ``tables`` defines the tables, ``recorder`` converts changes of a watch to rows, and
``query`` runs queries. Tables are named as in Monarch's telemetry if it has such a table.
"""
