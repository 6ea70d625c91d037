"""A training of its users' own: `_00_conf.sh`, job scripts for a master and a slave, and the script
that each node runs in its container, in the form of a patched Megatron-LM's users.

The job scripts are texts in variables: a here-document each for the image, the monitor and what
srun starts, `enroot start` in the last one, and in that the script of the node.
"""

from __future__ import annotations

CONF = """\
#!/bin/bash

CONTAINER_IMAGE_PATH="$HOME/cluster/image/pytorch-23.04.sqsh"
CONTAINER_PATH="/scratch/enroot/$USER/data/trainer"
CONTAINER_NAME="trainer"

HOMOGENEOUS_CLUSTER=false # true | false
MODEL='small'             # 'small' or 'xl'
NPROC_PER_NODE=2
NNODES=2
WORLD_SIZE=$((NPROC_PER_NODE * NNODES))
GLOBAL_BATCH_SIZE=8
MICRO_BATCH_SIZE=1
TENSOR_MP_SIZE=1
DP_SIZE=2
PIPELINE_MP_SIZE=2
PARTITION="3-1"
NSYS=false
PROFILE=true
MASTER_PORT=6787
RELOAD_CONTAINER=false

echo "model $MODEL"
if [ $MODEL == "small" ]; then
    HIDDEN_SIZE=64
    NUM_LAYERS=4
elif [ $MODEL == "xl" ]; then
    HIDDEN_SIZE=1600
    NUM_LAYERS=48
else
    echo "no such model"
    return 1
fi

if $PROFILE; then
    PROFILE_ARGS="--timing-log-level 2 \\
                  --timing-log-option all"
else
    PROFILE_ARGS=""
fi
"""
RUN = """\
#!/bin/bash

hostname
NODE_RANK=$1
MASTER_ADDR=$2

. _00_conf.sh

cp -r /root/indexes/* /root/trainer

echo "NODE_RANK: $NODE_RANK"
echo "PARTITION: $PARTITION"

RENDEZVOUS_ARGS="--nproc_per_node $NPROC_PER_NODE \\
                 --nnodes $NNODES \\
                 --node_rank $NODE_RANK \\
                 --master_addr $MASTER_ADDR \\
                 --master_port $MASTER_PORT"

DATA_PATH=/root/trainer/my-gpt2_text_document

MODEL_ARGS="--num-layers $NUM_LAYERS \\
            --hidden-size $HIDDEN_SIZE \\
            --num-attention-heads 4 \\
            --seq-length 32 \\
            --max-position-embeddings 32 \\
            --micro-batch-size $MICRO_BATCH_SIZE \\
            --global-batch-size $GLOBAL_BATCH_SIZE \\
            --lr 0.0002 \\
            --train-iters 6 \\
            --lr-decay-iters 1000 \\
            --lr-decay-style cosine \\
            --vocab-file words/vocab.json \\
            --merge-file words/merges.txt \\
            --lr-warmup-fraction .01 \\
            --fp16 \\
            --balance $PARTITION"

OUTPUT_ARGS="--log-interval 3 \\
             --eval-interval 100 \\
             --eval-iters 10 $PROFILE_ARGS"

TRAIN=$(cat << EOF
python -m torch.distributed.launch $RENDEZVOUS_ARGS _00_pretrain_gpt.py \\
       $MODEL_ARGS \\
       $OUTPUT_ARGS \\
       --data-path $DATA_PATH \\
       --tensor-model-parallel-size $TENSOR_MP_SIZE \\
       --pipeline-model-parallel-size $PIPELINE_MP_SIZE \\
       --DDP-impl local \\
       --split 100,0,0
EOF
)

function train() {
    OMP_NUM_THREADS=4 $TRAIN
}

train_under_nsys() {
    nsys profile -t cuda,nvtx -o ../log-nsys/$SLURM_JOB_ID -f true $TRAIN
}

if $NSYS; then
    train_under_nsys
else
    train
fi
"""
JOB = """\
#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --partition={queue}
#SBATCH --gres=gpu:{gpu}:2
#SBATCH --cpus-per-task=2
#SBATCH -o ../log2/%j.sbatch.%N.out
#SBATCH -e ../log2/%j.sbatch.%N.err

#***********************
GRES="gpu:{gpu}:2"
. _00_conf.sh
#***********************

cd $HOME/cluster/trainer
mkdir -p ../log2/$SLURM_JOB_ID
MASTER_ADDR='10.0.0.7'

PREPARE=$(cat <<EOF

    if $RELOAD_CONTAINER ; then
        rm -rf $CONTAINER_PATH
    fi

    if [ -d "$CONTAINER_PATH" ] ; then
        echo "unpacked already";
    else
        enroot create -n $CONTAINER_NAME $CONTAINER_IMAGE_PATH ;
    fi

EOF
)

MONITOR=$(cat <<EOF
    node=\\`hostname -s\\`
    gpustat -i > $HOME/cluster/log2/$SLURM_JOB_ID/\\$node.gpu &
EOF
)

INSIDE="rm -rf /root/trainer && \\
        cp -r /root/checkout /root/trainer && \\
        cd /root/trainer/ && \\
        bash _01_run_inter.sh"

SCRIPT=$(cat <<EOF

    $PREPARE

    $MONITOR

    nodes=(\\`scontrol show hostnames \\$SLURM_JOB_NODELIST\\`)
    node=\\`hostname -s\\`
    for (( index = 0; index < \\${{#nodes[@]}} ; index++ )); do
        if [ \\${{nodes[\\$index]}} == \\$node ]; then
            place=\\$index
        fi
    done

    enroot start --root \\
                 --rw \\
                 -m $HOME/cluster/trainer:/root/checkout \\
                 -m $HOME/cluster/log2:/root/log2 \\
                 -m $HOME/cluster/$MODEL:/root/indexes \\
                 $CONTAINER_NAME \\
                 bash -c "$INSIDE \\$place $MASTER_ADDR"
EOF
)

srun --partition=$SLURM_JOB_PARTITION \\
     --gres=$GRES \\
     --cpus-per-task=2 \\
     -o ../log2/%j/%N.out \\
     -e ../log2/%j/%N.err \\
     bash -c "$SCRIPT"
"""
SUBMIT = """\
#!/bin/bash

. _00_conf.sh

if $HOMOGENEOUS_CLUSTER ; then
    sbatch _02_homo_job.sh
else
    sbatch _02_hetero_master_job.sh
    sbatch _02_hetero_slave_job.sh
fi
"""
RESULT = """\
#!/bin/bash
jobid=$1
tail -n 3 ../log2/$jobid/*.out
cat ../log2/$jobid/*.out | grep "elapsed time"
"""
SCRIPTS = {
    "_00_conf.sh": CONF,
    "_01_run_inter.sh": RUN,
    "_02_homo_job.sh": JOB.format(nodes=2, queue="gpu2", gpu="a10"),
    "_02_hetero_master_job.sh": JOB.format(nodes=1, queue="gpu1", gpu="a100"),
    "_02_hetero_slave_job.sh": JOB.format(nodes=1, queue="gpu2", gpu="a10"),
    "_03_submit.sh": SUBMIT,
    "get_result.sh": RESULT,
}
