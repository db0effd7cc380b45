# One image for the server and the nodes of a federation: compose.yaml, docs/operations.md#containers.
# By its digest it is the same image for ever: --build-arg PYTHON=python:3.12-slim@sha256:..., the digest that
# `docker buildx imagetools inspect python:3.12-slim` prints.
ARG PYTHON=python:3.12-slim
FROM ${PYTHON}

# torch without CUDA, which is smaller; for GPUs: --build-arg PIP_EXTRA_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

RUN useradd --uid 1000 --create-home copfl
COPY pyproject.toml constraints.txt deploy/requirements.txt README.md LICENSE /src/
COPY src /src/src
# Of all but torch, which is of another index for each processor, exactly the files of these hashes.
RUN pip install --no-cache-dir --disable-pip-version-check -c /src/constraints.txt torch
RUN pip install --no-cache-dir --disable-pip-version-check --require-hashes -r /src/requirements.txt
RUN pip install --no-cache-dir --disable-pip-version-check --no-deps "/src[flower,privacy]"

# Nothing is written but to the mounted folders and /tmp: the root file system can be read-only.
ENV PYTHONDONTWRITEBYTECODE=1 FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_HOME=/tmp/flwr HOME=/tmp
USER 1000:1000
WORKDIR /tmp
ENTRYPOINT ["copfl"]
CMD ["--help"]
