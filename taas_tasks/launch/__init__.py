"""The training on the GPU hosts: node agent, preflight, rendezvous, rank bootstrap, write guard."""
