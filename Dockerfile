# One image for every part: Ray head, Ray workers and the service run the same versions of Everstep, torch and Ray.
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
RUN python -m venv /opt/everstep
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY everstep everstep
COPY service service
COPY storage storage
COPY train_fn train_fn
RUN /opt/everstep/bin/pip install --no-cache-dir --constraint constraints.txt '.[server]'

FROM python:3.12-slim-bookworm
RUN groupadd --gid 10001 everstep \
    && useradd --uid 10001 --gid everstep --create-home everstep \
    && install -d -o everstep -g everstep /var/lib/everstep /var/lib/everstep/storage /var/lib/everstep/home
COPY --from=build /opt/everstep /opt/everstep
ENV PATH=/opt/everstep/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    EVERSTEP_HOME=/var/lib/everstep/home \
    RAY_AUTH_MODE=token \
    RAY_USAGE_STATS_ENABLED=0
USER everstep
WORKDIR /home/everstep
