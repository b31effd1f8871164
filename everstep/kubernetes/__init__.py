"""What Kubernetes announces of its nodes, as cordons and drains of Ray's: the rules, a client of
Kubernetes's API that lists and watches, and the loop. The command line starts it. Imports the
client, errors and wire types."""
