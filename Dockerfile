# The image of the coordinator:  docker build -t REGISTRY/muster-coordinator:0.2.0.dev0 .
# tests/integration/operation/test_image.py runs these same steps without Docker. Before a release, `make pin-base` writes the
# present digest of the base image into the next line. The one here is of the index for all architectures.
ARG PYTHON=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${PYTHON} AS build
WORKDIR /src
RUN python -m venv --without-pip /opt/muster
COPY requirements/service.txt requirements/build.txt requirements/
RUN pip --python /opt/muster/bin/python install --no-cache-dir --require-hashes --no-deps --only-binary :all: -r requirements/service.txt
RUN pip install --no-cache-dir --require-hashes --no-deps --only-binary :all: -r requirements/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY service service
COPY relay relay
COPY watcher watcher
COPY keeper keeper
COPY preload preload
COPY client client
COPY checkpoint checkpoint
COPY worker_sdk worker_sdk
RUN pip wheel --no-deps --no-build-isolation --wheel-dir dist .
RUN pip --python /opt/muster/bin/python install --no-cache-dir --no-index --no-deps dist/*.whl
COPY dev/sbom.py dev/
ARG PYTHON
RUN BASE="${PYTHON}" /opt/muster/bin/python dev/sbom.py > /opt/muster/sbom.cdx.json

FROM ${PYTHON}
LABEL org.opencontainers.image.title="muster-coordinator" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/muster /opt/muster
# Without a volume the state is in the container; with one, the volume's file system gets this owner.
RUN install -d -o 10001 -g 10001 /var/lib/muster
ENV PATH=/opt/muster/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/muster
EXPOSE 7550 7551
STOPSIGNAL SIGTERM
ENTRYPOINT ["muster"]
CMD ["serve", "--listen=0.0.0.0:7550", "--http=0.0.0.0:7551", "--state=sqlite:////var/lib/muster/muster.db", "--log-format=json"]
