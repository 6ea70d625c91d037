# The training image for NVIDIA GPUs: CUDA, NCCL, PyTorch and apex of NVIDIA's image, DeepSpeed,
# and varuna_core.
#
#   pip wheel --no-deps -w containers/recipes .
#   podman build -t pytorch -f containers/recipes/gpu.Dockerfile containers/recipes
#   vjob container import podman://localhost/pytorch -o pytorch.sqsh
#
# needs podman or docker, enroot, 60 GB of disk and a way to nvcr.io (its PyTorch images need no
# account). 25.11 has Python 3.12, PyTorch 2.10.0a0 and CUDA 13.0: driver 580, or an older one of
# data center GPUs with the image's own compatibility libraries. apex is the one that NVIDIA has built
# into that image, from a source of its own: its metadata say 0.1, whatever the commit, so the release
# of the base is what pins it. `gpu-small` is a smaller image without it.
ARG BASE=nvcr.io/nvidia/pytorch:25.11-py3
FROM ${BASE}

# Its ops are compiled at their first use, on the node, for the GPUs that are there; a build machine
# has none. The image pins its own PyTorch in /etc/pip/constraint.txt, so pip cannot replace it.
ARG DEEPSPEED=0.18.2
RUN DS_BUILD_OPS=0 pip install --no-cache-dir --no-build-isolation "deepspeed==${DEEPSPEED}"

COPY vjob-*.whl /tmp/
RUN pip install --no-cache-dir --no-deps /tmp/vjob-*.whl && rm /tmp/vjob-*.whl

# Says at build time what would else fail in a job.
RUN python3 -c "from importlib.metadata import version as v; \
from importlib.util import find_spec; \
import torch, varuna_core; \
print(torch.__version__, v('apex'), v('deepspeed')); \
assert find_spec('amp_C'), 'apex without its compiled parts'; \
assert tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 9)"
