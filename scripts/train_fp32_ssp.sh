#!/usr/bin/env bash
# The command of the benchmark series: fp32, with stale weights where there are several stages.
#
#     train_fp32_ssp.sh EPOCHS BATCH PLACEMENT MODEL [DATA_DIR] [NODE_IPS]
#
#     train_fp32_ssp.sh 4 252 0:0-6.0:7 alexnet                                seven cards and one, made-up images
#     train_fp32_ssp.sh 4 256 '' alexnet                                       data parallel over every card
#     train_fp32_ssp.sh 4 64 0:0-7,1:0-7.0:0-7,1:0-7 resnet50 DIR IP,IP        two hosts, both stages on all cards
#
# EPOCHS     passes over the images; of made-up ones an epoch has ImageNet's 1,281,167
# BATCH      rows of one device of the first stage
# PLACEMENT  stages on host:device; '' is one stage on every device
# MODEL      a model of `stagewright models`; its recipe is used where there is one of that name
# DATA_DIR   OFRecord parts, tar shards or class folders; made-up images where it is left out
# NODE_IPS   the hosts to start over ssh, in the order of the placement's numbers
#
# What was once edited by hand is set in the environment:
#
#     HOSTS=2         hosts; by default as many as NODE_IPS names
#     DEVICES=8       devices a host, for an empty placement
#     RATIO=11:7      how the stages' costs stand; by default as their numbers of devices
#     STATIC=1        1: a static order (1f1b); 0: workers run whatever is ready
#     STALENESS=ssp   0 for exact, synchronous training
#     STEPS=1000      ends the run early
#     DEVICE=cuda     or cpu
#     IMAGE_SIZE=224  side of the images
#     LOG_EVERY=100   steps between log lines
#     OUT=DIR         folder for logs and the record
#     OPTIONS='…'     anything else for `stagewright train`
#     STAGEWRIGHT=…   the command, where it is not on the path
#
# DEVICE=cpu STEPS=3 rehearses the same on a machine without cards: NODE_IPS are not asked, every device is a worker
# process here, images are 64 pixels wide, and every step is logged. The hosts share eight workers, so DEVICES is
# 8 / hosts, and 0:0-7,1:0-7 becomes 0:0-3,0:4-7; set DEVICES=8 for all sixteen.
set -euo pipefail

if [ $# -lt 4 ] || [ $# -gt 6 ]; then
    sed -n '2,8p' "$0" | sed 's/^# \{0,1\}//' >&2
    exit 2
fi
epochs=$1 batch=$2 placement=$3 model=$4 data=${5:-} nodes=${6:-}

root=$(cd "$(dirname "$0")/.." && pwd)
stagewright=${STAGEWRIGHT:-$(command -v stagewright || echo "$root/.venv/bin/stagewright")}
device=${DEVICE:-cuda}

# How many hosts: as said, as named, or as the placement numbers them.
if [ -n "${HOSTS:-}" ]; then
    hosts=$HOSTS
elif [ -n "$nodes" ]; then
    hosts=$(tr ',' '\n' <<<"$nodes" | wc -l)
else
    hosts=$(tr '.,' '\n\n' <<<"$placement" | cut -d: -f1 | sort -n | tail -1)
    hosts=$((${hosts:-0} + 1))
fi

if [ "$device" = cpu ]; then
    devices=${DEVICES:-$((8 / hosts > 0 ? 8 / hosts : 1))}
    image_size=${IMAGE_SIZE:-64} log_every=${LOG_EVERY:-1} nodes=
else
    devices=${DEVICES:-8}
    image_size=${IMAGE_SIZE:-} log_every=${LOG_EVERY:-100}
fi

# An empty placement is every device of every host.
if [ -z "$placement" ]; then
    placement=$(for ((host = 0; host < hosts; host++)); do echo "$host:0-$((devices - 1))"; done | paste -sd,)
fi
if [ "$device" = cpu ]; then
    # Runs of devices end where the workers of a host do, and further hosts' workers come after them: where a host has
    # four, 0:0-7 is 0:0-3, and 1:0-7 is 0:4-7.
    placement=$(sed -E 's/[.,]/\n&\n/g' <<<"$placement" | awk -F'[:-]' -v many="$devices" '
        NF == 3 && $2 < many && $3 >= many { $3 = many - 1 }
        NF > 1 { $0 = "0:" $2 + $1 * many (NF == 3 ? "-" $3 + $1 * many : "") }
        { printf "%s", $0 }')
fi

options=(--epochs "$epochs" --batch-per-device "$batch" --placement "$placement" --device "$device")
options+=(--precision fp32 --log-every "$log_every" --log-format original)
if [ -f "$root/recipes/$model.yaml" ]; then options+=(--recipe "$root/recipes/$model.yaml"); fi
case $placement in *.*)
    options+=(--staleness "${STALENESS:-ssp}")
    if [ "${STATIC:-1}" = 0 ]; then options+=(--schedule dynamic); else options+=(--schedule 1f1b); fi
    if [ -n "${RATIO:-}" ]; then options+=(--ratio "$RATIO"); fi
    ;;
esac
if [ -n "$data" ]; then options+=(--data "$data"); fi
if [ -n "$nodes" ]; then options+=(--nodes "$nodes"); fi
if [ -n "${STEPS:-}" ]; then options+=(--steps "$STEPS"); fi
if [ -n "$image_size" ]; then options+=(--image-size "$image_size"); fi
if [ -n "${OUT:-}" ]; then options+=(-o "$OUT"); fi

# shellcheck disable=SC2086  # OPTIONS is a list of words
exec "$stagewright" train "$model" "${options[@]}" ${OPTIONS:-}
