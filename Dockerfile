# One image for both services, on a machine without a GPU. No BuildKit features: any builder will do.
#   docker build -t rocmforge .                       docker run --rm rocmforge services.kvcache --help
ARG BASE=python:3.12-slim-bookworm

# The generator of the protobuf code is needed here only.
FROM ${BASE} AS protos
WORKDIR /app
COPY constraints.txt ./
RUN python3 -m venv /venv \
 && /venv/bin/pip install --no-cache-dir -q -c constraints.txt grpcio-tools googleapis-common-protos
COPY protos protos
RUN /venv/bin/python -m grpc_tools.protoc -Iprotos -I"$(/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
        --python_out=protos --grpc_python_out=protos $(find protos -name '*.proto')

# The pinned run-time dependencies, before the sources: a changed source does not install them again.
FROM ${BASE} AS dependencies
WORKDIR /app
COPY pyproject.toml constraints.txt ./
COPY clients/python/pyproject.toml clients/python/
# rocmforge-client is clients/python, which is copied below.
RUN python3 -m venv /venv \
 && for project in . clients/python; do \
        /venv/bin/python -c 'import sys, tomllib; print(*tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"], sep="\n")' \
            $project/pyproject.toml; \
    done | grep -v '^rocmforge-client==' > /tmp/requirements.txt \
 && /venv/bin/pip install --no-cache-dir -q -c constraints.txt -r /tmp/requirements.txt

FROM ${BASE}
# Nobody's name, no home, no shell; the number is the one that docker-compose.yml gives its volumes to.
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin rocmforge
COPY --from=dependencies /venv /venv
WORKDIR /app
COPY LICENSE pyproject.toml ./
COPY models models
COPY kernels kernels
COPY services services
COPY clients/python/rocmforge clients/python/rocmforge
COPY --from=protos /app/protos protos
ENV PATH=/venv/bin:$PATH PYTHONPATH=/app:/app/protos:/app/clients/python PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# The root file system is read-only at run time, so the byte code is written now.
RUN python -m compileall -q services kernels protos clients
USER 10001:10001
ENTRYPOINT ["python", "-m"]
CMD ["services.engine", "--help"]
