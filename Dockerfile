# An image in which the command runs, for CPUs by default:
#
#     docker build -t stagewright .
#     docker build -t stagewright:cuda --build-arg TORCH=cu130 .          (where it runs, NVIDIA's container toolkit)
#     docker run --rm --shm-size 2g stagewright python scripts/demo.py /tmp/demo
#
# TORCH is a build of torch: cpu, or a version of CUDA that the hosts' driver knows. Workers share memory in /dev/shm.
FROM python:3.11-slim

ARG TORCH=cpu
WORKDIR /opt/stagewright
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src src
COPY clusters clusters
COPY recipes recipes
COPY suites suites
COPY scripts scripts
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url https://download.pytorch.org/whl/$TORCH ".[data,gpu,hf]"
CMD ["stagewright", "--help"]
