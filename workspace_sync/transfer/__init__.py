"""The fan-out: blocks of content go from the client to some hosts, and from these to the others.

``scheduler`` decides who fetches what from whom; ``blocks`` packs content; ``agent`` is the actor on each host, and
``agents`` starts it; ``messages`` lists what crosses; ``staging_run`` drives one sync over all hosts.
"""
