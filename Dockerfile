# One image for every part: Ray head, Ray workers and the service run the same Everstep, torch and Ray.
# Targets: `cpu` (the default of docker-compose.yml) and `cuda`, whose torch brings CUDA and NCCL; the hosts bring the driver.
# `--build-arg PYTHON=python:3.13-slim-bookworm@sha256:…` takes a base image by its digest, and
# `--build-arg LOCK=locks/server-linux-x86_64-cp313.txt` packages by their hashes, all but torch and what that brings.
# The ranks of a run compare their versions before they train (everstep, ray, torch, python, CUDA, NCCL).
ARG PYTHON=python:3.13-slim-bookworm

FROM ${PYTHON} AS build
WORKDIR /src
RUN python -m venv /opt/everstep
ARG LOCK=
COPY locks locks
RUN [ -z "${LOCK}" ] || /opt/everstep/bin/pip install --no-cache-dir --require-hashes --no-deps --requirement "${LOCK}"
# What pyproject.toml asks for comes before the source: a change of the source is built again in seconds.
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; of = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*of['dependencies'], *of['optional-dependencies']['server'], sep='\n')" >requirements.txt

FROM build AS wheel
COPY README.md LICENSE ./
COPY everstep everstep
COPY service service
COPY storage storage
COPY train_fn train_fn
RUN /opt/everstep/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM build AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN /opt/everstep/bin/pip install --no-cache-dir --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" --requirement requirements.txt
# Where the index does not answer, pip takes PyPI's builds without a word, and these are for CUDA.
COPY deploy/check-torch-build.py ./
ARG ANY_TORCHVISION=
RUN ANY_TORCHVISION="${ANY_TORCHVISION}" TORCH_INDEX="${TORCH_INDEX}" /opt/everstep/bin/python check-torch-build.py

FROM build AS build-cuda
RUN /opt/everstep/bin/pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt

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
WORKDIR /home/everstep

# The packages are a layer of their own below ours: a host that has them fetches a few megabytes for a change of the source.
FROM runtime AS cuda
COPY --from=build-cuda /opt/everstep /opt/everstep
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-index --no-deps /wheels/*.whl
USER everstep

FROM runtime AS cpu
COPY --from=build-cpu /opt/everstep /opt/everstep
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-index --no-deps /wheels/*.whl
USER everstep
