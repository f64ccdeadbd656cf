# Image with hotcore and torch for NVIDIA GPUs. Not built yet: no machine of the project runs docker.
#
#   docker build -t hotcore .                         # about an hour on two cores, for all architectures
#   docker build -t hotcore --build-arg CUDAARCHS=90a-real .              # H100 and H200 only, faster
#   docker run --rm --gpus all hotcore                # says what was built, and how well it fits the GPU
#   docker run --rm --gpus all -it -v "$PWD:/work" -w /work hotcore bash
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS build
ARG CUDAARCHS="80-real;86-real;89-real;90a-real;100-real;120-real;120-virtual"
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-venv
COPY . /source
RUN python3 -m venv /venv && HOT_CUDA=ON /venv/bin/pip wheel --no-deps --wheel-dir /wheels /source

# The wheel is for Python 3.12 and newer, and its CUDA 13 for drivers from 580 on. Triton compiles its launchers with gcc.
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN --mount=from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/*.whl)[torch]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["python", "-m", "hotcore.info"]
