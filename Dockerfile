# One image for each mesh service: docker build --target service --build-arg SERVICE=scheduler -t treadle-scheduler .
# The tools service has a target of its own: docker build --target tools --build-arg SERVICE=tools -t treadle-tools .
# Without a network: put the wheels into a folder `wheelhouse`, and add --build-arg OFFLINE=1 (docs/operations.md).
#
# Both base images have Debian's Python at /usr/bin/python3, which the venv of the build names.
ARG BUILD_IMAGE=debian:bookworm-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251
ARG SERVICE_IMAGE=gcr.io/distroless/python3-debian12:nonroot@sha256:7d1042ce588ab97019fe95c24ffca7bc5a82ccdac572511d5e09bda4435c89c5
ARG TOOLS_IMAGE=debian:bookworm-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251

FROM ${BUILD_IMAGE} AS base
ARG OFFLINE
# Compilers for the kernels, and for what the tools' environments build from source.
RUN if [ -z "${OFFLINE}" ]; then \
      apt-get update && apt-get install -y --no-install-recommends g++ libc6-dev python3-dev python3-venv; \
    fi
ENV PIP_NO_CACHE_DIR=1

# What all services need, each file compared with its hashes. Some packages have no wheel: setuptools, checked as well, builds them.
FROM base AS wheels
ARG OFFLINE
COPY requirements-images.txt wheelhous[e] /src/
RUN mkdir /wheels \
 && if [ -n "${OFFLINE}" ]; then cp /src/*.whl /wheels; else \
      python3 -m venv /opt/builder \
      && sed -n '/^setuptools==/,/[^\\]$/p' /src/requirements-images.txt > /tmp/setuptools.txt \
      && /opt/builder/bin/pip install --require-hashes -r /tmp/setuptools.txt \
      && /opt/builder/bin/pip wheel --require-hashes --no-deps --no-build-isolation -w /wheels -r /src/requirements-images.txt; \
    fi

FROM base AS source
COPY --from=wheels /wheels /wheels
COPY pyproject.toml README.md LICENSE /src/
COPY clients/python /src/clients/python
COPY core /src/core
COPY learned /src/learned
COPY runtime /src/runtime
COPY services /src/services
COPY sim /src/sim
COPY cli /src/cli

# Compiled once for all services: numba and its compiler stay here (ADR 0048).
FROM source AS kernels
COPY scripts/compile_kernels.py /src/scripts/
RUN python3 -m venv /opt/compiler \
 && /opt/compiler/bin/pip install --no-index --find-links /wheels setuptools /src/clients/python "/src[placement,scheduler]" \
 && mkdir /opt/kernels && /opt/compiler/bin/python /src/scripts/compile_kernels.py /opt/kernels

FROM source AS build
COPY --from=kernels /opt/kernels /opt/kernels
ARG SERVICE
# Left out: what the kernels were compiled with; matplotlib, with which a library of reasoning-gym can draw; tests; debug symbols, which
# are most of uvloop. numpy's libraries stay as they are: they were patched to find each other, which a strip can undo.
RUN python3 -m venv /opt/treadle \
 && /opt/treadle/bin/pip install --no-index --find-links /wheels /src/clients/python "/src[${SERVICE}]" \
 && /opt/treadle/bin/pip uninstall -q -y numba llvmlite \
      matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing setuptools pip \
 && cd /opt/treadle/lib/python3*/site-packages \
 && cp /opt/kernels/* . \
 && find . \( -path './numpy/*' -o -path './sympy/*' -o -path './mpmath/*' \) -name tests -type d -prune -exec rm -r {} + \
 && find . -name '*.so' -not -path './numpy*' -exec strip --strip-debug {} +

FROM ${TOOLS_IMAGE} AS tools
ARG SERVICE=tools
ARG OFFLINE
# bubblewrap is what every action runs in.
RUN if [ -z "${OFFLINE}" ]; then \
      apt-get update && apt-get install -y --no-install-recommends bubblewrap python3 && apt-get clean && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build /opt/treadle /opt/treadle
ENV PATH=/opt/treadle/bin:$PATH PYTHONUNBUFFERED=1 TREADLE_SERVICE=${SERVICE} TREADLE_HEALTH_SOCKET=/tmp/health
USER 65532:65532
ENTRYPOINT ["/opt/treadle/bin/python", "-m", "treadle_runtime.start"]

FROM ${SERVICE_IMAGE} AS service
ARG SERVICE
COPY --from=build /opt/treadle /opt/treadle
ENV PATH=/opt/treadle/bin:$PATH PYTHONUNBUFFERED=1 TREADLE_SERVICE=${SERVICE} TREADLE_HEALTH_SOCKET=/tmp/health
USER 65532:65532
ENTRYPOINT ["/opt/treadle/bin/python", "-m", "treadle_runtime.start"]
