# The sidecar, small and without a shell's comforts. Build: docker build -t smartsearch-sidecar .
#
# Run with a read-only root; what it writes is the run directory and a few links in /dev/shm:
#   docker run --read-only --network host -v runs:/runs -v ./config:/etc/smartsearch-sidecar:ro \
#     smartsearch-sidecar serve --config /etc/smartsearch-sidecar/training.toml --run-dir /runs/001
#
# --build-arg REQUIREMENTS=full adds Parquet references and NATS (some 150 MB). There is no git in it:
# with rewards, mount the scorer's one file and pin it (reward.source) instead of a checkout.

ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
ARG REQUIREMENTS=runtime
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1
WORKDIR /src
COPY requirements/ requirements/
# Every byte that is installed has its hash in the lock, the build backend's included.
RUN python -m venv /opt/build \
    && /opt/build/bin/pip install --require-hashes --only-binary :all: -r requirements/build.txt \
    && python -m venv --without-pip /opt/sidecar \
    && /opt/build/bin/pip --python /opt/sidecar/bin/python install \
        --require-hashes --only-binary :all: -r "requirements/${REQUIREMENTS}.txt"
COPY pyproject.toml README.md LICENSE ./
COPY smartsearch_sidecar/ smartsearch_sidecar/
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/build/bin/pip --python /opt/sidecar/bin/python install --no-deps --no-index /wheels/*.whl \
    && /opt/sidecar/bin/python -m compileall -q /opt/sidecar/lib

FROM python:${PYTHON}-slim
# A fixed number, so that a volume can be given to it.
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin sidecar \
    && install --directory --owner sidecar --group sidecar --mode 0700 /runs
COPY --from=build /opt/sidecar /opt/sidecar
# /dev/shm is writable where the root is not: opening an index needs a folder of links for a moment.
ENV PATH=/opt/sidecar/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 TMPDIR=/dev/shm
USER 10001:10001
WORKDIR /runs
VOLUME ["/runs"]
EXPOSE 8765
# Alive, not good: a latched run stays up to say why, and a restart would cure nothing. The port is
# the configuration's default; another one is told by SIDECAR_PROBE.
ENV SIDECAR_PROBE=http://127.0.0.1:8765/livez
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s --retries=3 CMD ["python", "-c", \
    "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open(os.environ['SIDECAR_PROBE'], timeout=2)"]
# SIGTERM drains: every admitted search is answered and recorded before the process ends.
STOPSIGNAL SIGTERM
ENTRYPOINT ["smartsearch-sidecar"]
CMD ["serve", "--config", "/etc/smartsearch-sidecar/config.toml"]
