"""Distribute content: blocks are sent from the client to some hosts, and from these to the others.

``scheduler`` decides which host fetches which block from where; ``blocks`` packs content; ``agent`` is the actor on
each host; ``messages`` lists the messages; ``staging_run`` drives one sync over all hosts.
"""
