"""An old `_00_conf.sh` with its #SBATCH lines to conf.yaml: `translate`. Imports the conf."""
