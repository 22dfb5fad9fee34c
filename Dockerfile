# docker build --build-arg SET=cuda13 -t outcore .       sets: cpu, cuda12, cuda13; see docs/install.md
FROM python:3.12-slim-bookworm
ARG SET=cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 outcore \
    && install -d -o outcore /opt/outcore /work
USER outcore
COPY --chown=outcore . /opt/outcore
WORKDIR /opt/outcore
# 1: not ready, as a build without a GPU is for a CUDA set; the container's first `outcore setup --check` tells.
RUN python setup.py --set ${SET}; code=$?; [ $code -eq 0 ] || { [ $code -eq 1 ] && [ ${SET} != cpu ]; }
ENV PATH=/opt/outcore/.venv/bin:$PATH HOME=/work PYTHONDONTWRITEBYTECODE=1
VOLUME /work
WORKDIR /work
CMD ["outcore", "--help"]
