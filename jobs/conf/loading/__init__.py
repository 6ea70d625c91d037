"""conf.yaml to a checked JobConf: `load.read_conf` and `load.parse_conf` are the one way in.

Imports the conf, the programs (each knows what it cannot do) and the containers.
"""
