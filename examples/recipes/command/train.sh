#!/bin/sh
# Each rank runs this, with the variables that torchrun would have set.
set -eu
export TOKENIZERS_PARALLELISM=false
echo "rank $RANK of $WORLD_SIZE on $(hostname)" >&2
exec python -u train.py "$@"
