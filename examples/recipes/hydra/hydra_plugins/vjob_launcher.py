"""`hydra/launcher=vjob`: each job of a sweep is a run of vjob.

Hydra finds this file beside the script. It is the launcher of hydra-submitit-launcher with vjob's
executor; `hydra.launcher.conf` names a conf whose nodes the jobs have.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
from hydra.core.config_store import ConfigStore
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher


class VjobLauncher(BaseSubmititLauncher):
    """hydra-submitit-launcher's, with vjob's executor."""

    _EXECUTOR = "vjob"

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        # The ranks need not find this file.
        cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass
class VjobConf(BaseQueueConf):
    """Submitit's parameters that are given go over the conf's keys."""

    _target_: str = "hydra_plugins.vjob_launcher.VjobLauncher"
    submitit_folder: str = "log"
    timeout_min: int | None = None
    tasks_per_node: int | None = None
    nodes: int | None = None
    name: str | None = None
    conf: str | None = None
    set: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    max_num_timeout: int = 0


ConfigStore.instance().store(group="hydra/launcher", name="vjob", node=VjobConf(), provider="vjob")
