# One image for each mesh service: docker build --target service --build-arg SERVICE=scheduler -t treadle-scheduler .
# The tools service has a target of its own: docker build --target tools --build-arg SERVICE=tools -t treadle-tools .
# Without a network: put the wheels into a folder `wheelhouse`, and add --build-arg OFFLINE=1 (docs/operations.md).
#
# Both base images have Debian's Python at /usr/bin/python3, which the venv of the build names.
ARG BUILD_IMAGE=debian:bookworm-slim
ARG SERVICE_IMAGE=gcr.io/distroless/python3-debian12:nonroot
ARG TOOLS_IMAGE=debian:bookworm-slim

FROM ${BUILD_IMAGE} AS build
ARG SERVICE
ARG OFFLINE
# A compiler for what the tools' environments build from source.
RUN if [ -z "${OFFLINE}" ]; then \
      apt-get update && apt-get install -y --no-install-recommends python3-venv \
        $([ "${SERVICE}" != tools ] || echo gcc libc6-dev python3-dev); \
    fi
COPY pyproject.toml README.md LICENSE requirements-mesh.txt wheelhous[e] /src/
COPY clients/python /src/clients/python
COPY core /src/core
COPY learned /src/learned
COPY runtime /src/runtime
COPY services /src/services
COPY sim /src/sim
COPY cli /src/cli
# The kernels are compiled for any processor of the architecture: the image may run on another one than built it.
ENV TREADLE_SERVICE=${SERVICE} NUMBA_CPU_NAME=generic NUMBA_CACHE_DIR=/opt/treadle/kernels
RUN python3 -m venv /opt/treadle \
 && /opt/treadle/bin/pip install --no-cache-dir ${OFFLINE:+--no-index --find-links /src} -c /src/requirements-mesh.txt \
      /src/clients/python "/src[${SERVICE}]" \
 && /opt/treadle/bin/python -m treadle_runtime.start --compile \
 && /opt/treadle/bin/pip uninstall -q -y setuptools pip \
 && find /opt/treadle -name tests -type d -path '*/numpy/*' -prune -exec rm -r {} +

FROM ${TOOLS_IMAGE} AS tools
ARG SERVICE=tools
ARG OFFLINE
# bubblewrap is what every action runs in.
RUN if [ -z "${OFFLINE}" ]; then \
      apt-get update && apt-get install -y --no-install-recommends bubblewrap python3 && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build /opt/treadle /opt/treadle
ENV PATH=/opt/treadle/bin:$PATH PYTHONUNBUFFERED=1 TREADLE_SERVICE=${SERVICE} TREADLE_HEALTH_SOCKET=/tmp/health
ENV NUMBA_CPU_NAME=generic NUMBA_CACHE_DIR=/tmp/kernels TREADLE_KERNELS=/opt/treadle/kernels
USER 65532:65532
ENTRYPOINT ["/opt/treadle/bin/python", "-m", "treadle_runtime.start"]

FROM ${SERVICE_IMAGE} AS service
ARG SERVICE
COPY --from=build /opt/treadle /opt/treadle
ENV PATH=/opt/treadle/bin:$PATH PYTHONUNBUFFERED=1 TREADLE_SERVICE=${SERVICE} TREADLE_HEALTH_SOCKET=/tmp/health
ENV NUMBA_CPU_NAME=generic NUMBA_CACHE_DIR=/tmp/kernels TREADLE_KERNELS=/opt/treadle/kernels
USER 65532:65532
ENTRYPOINT ["/opt/treadle/bin/python", "-m", "treadle_runtime.start"]
