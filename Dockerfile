# One image for the server and the nodes of a federation: compose.yaml, docs/operations.md#containers.
FROM python:3.12-slim

# torch without CUDA, which is smaller; for GPUs: --build-arg PIP_EXTRA_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

RUN useradd --uid 1000 --create-home copfl
COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir --disable-pip-version-check -c /src/constraints.txt "/src[flower,privacy]"

# Nothing is written but to the mounted folders and /tmp: the root file system can be read-only.
ENV PYTHONDONTWRITEBYTECODE=1 FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_HOME=/tmp/flwr HOME=/tmp
USER 1000:1000
WORKDIR /tmp
ENTRYPOINT ["copfl"]
CMD ["--help"]
