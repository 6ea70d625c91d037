"""Parses lists of options from stdin with Megatron-LM's parser: `megatron_parser.py CHECKOUT`."""

import contextlib
import io
import json
import os
import sys
import types

import megatron_imports  # noqa: F401  # beside this file
import torch

# The checks ask which GPU there is; parsing needs none.
torch.cuda.get_device_capability = lambda *_: (8, 0)
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=8, minor=0)
os.environ["NO_VCS_VERSION"] = "1"  # else its version has the commit of the folder that this is in
root = sys.argv[1]
sys.path.insert(0, root)

from megatron.core import __version__ as version  # noqa: E402  # the path comes first
from megatron.training import arguments  # noqa: E402

layouts = {}
for name, asked in json.load(sys.stdin).items():
    os.environ.update(RANK="0", WORLD_SIZE=str(asked["world"]))
    sys.argv = ["pretrain_gpt.py", *asked["words"]]
    print(name, file=sys.stderr)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints all its arguments
        found = arguments.parse_args()
        defaults = {"tokenizer_type": "GPT2BPETokenizer"}  # as its pretrain_gpt.py says
        found = arguments.validate_args(found, defaults) or found
    layouts[name] = found.pipeline_model_parallel_layout
print(json.dumps({"version": version, "layouts": layouts}, default=str))
