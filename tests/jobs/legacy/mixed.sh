#!/bin/bash
# _02_hetero_slave_job.sh
#SBATCH --nodes=7
#SBATCH --partition=gpu2
#SBATCH --gres=gpu:a10:4
#SBATCH --cpus-per-task=14
#SBATCH --ntasks-per-node=1
#SBATCH -o ../log2/%j.sbatch.%N.out
#************************************************************
GRES="gpu:a10:4"
. _00_conf.sh
#************************************************************
MASTER_ADDR='192.168.120.60'
srun --gres=$GRES bash -c "./_01_run_inter.sh"

#!/bin/bash
# _02_hetero_master_job.sh
#SBATCH --nodes=1
#SBATCH -p gpu1
#SBATCH --gres=gpu:a100:4
#SBATCH --mem=0
#SBATCH --time=1-12:00:00
#SBATCH --constraint=ib
GRES="gpu:a100:4"

# _00_conf.sh
HOMOGENEOUS_CLUSTER=false
MODEL=small
NPROC_PER_NODE=4
NNODES=8
export WORLD_SIZE=$(($NPROC_PER_NODE * ${NNODES}))
GLOBAL_BATCH_SIZE=$((WORLD_SIZE * 2)); MICRO_BATCH_SIZE=1
TENSOR_MP_SIZE=1
DP_SIZE=8
PIPELINE_MP_SIZE=4
PARTITION="2-4-4-2"
NSYS=true
PROFILE=true
MASTER_PORT=40000
RELOAD_CONTAINER=true
ZERO=true
CONTAINER_IMAGE_PATH="/images/pytorch+23.03-py3.sqsh"
CONTAINER_NAME=megatron-latest
export NCCL_DEBUG=INFO HF_TOKEN=hunter2
HOSTS=$(scontrol show hostnames)
