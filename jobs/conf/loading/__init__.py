"""Load conf.yaml as a checked JobConf: `load.read_conf` and `load.parse_conf` are the only entry
points.

Imports the conf, the programs (each knows what it cannot do) and the containers.
"""
