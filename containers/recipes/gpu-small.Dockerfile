# A smaller training image for NVIDIA GPUs, without apex: Python, PyTorch's own wheels with the CUDA
# and NCCL that they bring, and varuna_core.
#
#   pip wheel --no-deps -w containers/recipes .
#   podman build -t small -f containers/recipes/gpu-small.Dockerfile containers/recipes
#   vjob container import podman://localhost/small -o small.sqsh
#
# needs podman or docker, enroot, 30 GB of disk and a way to Docker Hub and PyPI. These wheels have
# CUDA 12.8 and NCCL 2.27.5: driver 525.60.13 or later. There is no CUDA toolkit (nvcc), so nothing
# that compiles CUDA at its first use, as DeepSpeed's own optimizers do, and no Nsight: `gpu` has.
ARG BASE=docker.io/library/python:3.12.12-slim-bookworm
FROM ${BASE}

# A compiler for torch.compile, `ip route get` to find the interface, ps for a look from inside. Not
# pinned: Debian keeps only the newest of each.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev iproute2 procps \
    && rm -rf /var/lib/apt/lists/*

# PyPI's wheels of torch have CUDA on x86_64; the check below says where they have not.
ARG TORCH=2.9.1
ARG NUMPY=2.3.5
RUN pip install --no-cache-dir "torch==${TORCH}" "numpy==${NUMPY}"

COPY vjob-*.whl /tmp/
RUN pip install --no-cache-dir --no-deps /tmp/vjob-*.whl && rm /tmp/vjob-*.whl

# Says at build time what would else fail in a job.
RUN python3 -c "import torch, varuna_core; \
print(torch.__version__, torch.version.cuda, torch.cuda.nccl.version()); \
assert torch.version.cuda, 'a build without CUDA'; \
assert tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 9)"
