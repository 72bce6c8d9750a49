"""Meshes under load while their ranks, agents, hosts and connections break at random, and are healed.

    python -m tests.chaos --seed 7 --minutes 10
    python -m tests.chaos --seed 7 --minutes 10 --hosts 3 [--namespaces]

What must hold, whatever happens:

* every call ends before its deadline, with an answer or with an error that names what died;
* an answer is from the proc that stood in that place when the call was made;
* what one sender sends to one actor arrives once, in order, and without gaps for as long as both live;
* nothing dies that was not harmed: a short stall of a connection, a rank or an agent is no failure;
* what was lost with its host ends there, too;
* after the last heal everything answers, everybody reaches everybody, and when all is over nothing is left.

The same seed gives the same sequence of events; when each of them meets the load is up to the machine.

``events`` has the sequence, ``load`` the actors and those who call them, ``engine`` what breaks on one host and
the judge, ``hosts`` what breaks on several, ``wires`` and ``namespaces`` the connections between these.
"""
