"""conf.yaml to a checked JobConf: `load.read_conf` and `load.parse_conf` are the one way in.

`shell_import.translate_shell_conf` makes a conf.yaml of an old shell conf. Imports the conf, the
programs (each knows what it cannot do) and the containers.
"""
