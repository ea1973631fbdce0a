# One image for each mesh service: docker build --build-arg SERVICE=scheduler -t treadle-scheduler .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE} AS build
ARG SERVICE
COPY clients/python /src/clients/python
COPY pyproject.toml README.md LICENSE requirements-mesh.txt /src/
COPY core /src/core
COPY learned /src/learned
COPY runtime /src/runtime
COPY services /src/services
COPY sim /src/sim
COPY cli /src/cli
RUN python -m venv /opt/treadle \
 && /opt/treadle/bin/pip install --no-cache-dir -c /src/requirements-mesh.txt /src/clients/python "/src[${SERVICE}]"

FROM ${PYTHON_IMAGE}
ARG SERVICE
# bubblewrap is what the tools service runs every action in; the others do not carry it.
RUN if [ "${SERVICE}" = tools ]; then \
      apt-get update && apt-get install -y --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build /opt/treadle /opt/treadle
ENV PATH=/opt/treadle/bin:$PATH PYTHONUNBUFFERED=1 TREADLE_SERVICE=${SERVICE}
USER 65532:65532
# Python, not a shell, is process 1's command: SIGTERM must reach it, or nothing drains.
ENTRYPOINT ["/bin/sh", "-c", "exec python -m treadle_${TREADLE_SERVICE}"]
