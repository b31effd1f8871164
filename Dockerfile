# One image for every part: Ray head, Ray workers and the service run the same Everstep, torch and Ray.
# Targets: `cpu` (the default of docker-compose.yml) and `cuda`, whose torch brings CUDA and NCCL; the hosts bring the driver.
# `--build-arg PYTHON=python:3.12-slim-bookworm@sha256:…` takes a base image by its digest, and
# `--build-arg LOCK=locks/server-linux-x86_64-cp312.txt` packages by their hashes, all but torch and what that brings.
# The ranks of a run compare their versions before they train (everstep, ray, torch, python, CUDA, NCCL).
ARG PYTHON=python:3.12-slim-bookworm

FROM ${PYTHON} AS build
WORKDIR /src
RUN python -m venv /opt/everstep
ARG LOCK=
COPY locks locks
RUN [ -z "${LOCK}" ] || /opt/everstep/bin/pip install --no-cache-dir --require-hashes --no-deps --requirement "${LOCK}"
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY everstep everstep
COPY service service
COPY storage storage
COPY train_fn train_fn

FROM build AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN /opt/everstep/bin/pip install --no-cache-dir --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" '.[server]'

FROM build AS build-cuda
RUN /opt/everstep/bin/pip install --no-cache-dir --constraint constraints.txt '.[server]'

FROM ${PYTHON} AS runtime
RUN groupadd --gid 10001 everstep \
    && useradd --uid 10001 --gid everstep --create-home everstep \
    && install -d -o everstep -g everstep /var/lib/everstep /var/lib/everstep/storage /var/lib/everstep/home /var/lib/everstep/gcs
ENV PATH=/opt/everstep/bin:/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    EVERSTEP_HOME=/var/lib/everstep/home \
    RAY_AUTH_MODE=token \
    RAY_USAGE_STATS_ENABLED=0
USER everstep
WORKDIR /home/everstep

FROM runtime AS cuda
COPY --from=build-cuda /opt/everstep /opt/everstep

FROM runtime AS cpu
COPY --from=build-cpu /opt/everstep /opt/everstep
