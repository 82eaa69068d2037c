# Two images, `kvcache` and `engine`, each for a CPU, for ROCm and for CUDA: `make images`, or for example
#   docker build --target engine -t rocmforge-engine .          docker run --rm rocmforge-engine --help
# `kvcache-tiers` is `kvcache` with what --outer needs. No BuildKit features: any builder will do.
#   BASE      what the variant's image is made from
#   VARIANT   cpu, rocm or cuda: an extra of pyproject.toml
#   PACKAGES  packages of the distribution that the variant needs beside Python
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS python
ARG PACKAGES=""
RUN apt-get update -qq \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3 ${PACKAGES} >/dev/null \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log /usr/share/doc /usr/share/man

# The pinned run-time dependencies, before the sources: a changed source does not install them again.
# /venv has no pip of its own; the one that fills it stays here, and so does what makes the wheel.
FROM python AS dependencies
RUN apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends binutils python3-venv >/dev/null
WORKDIR /src
COPY pyproject.toml constraints.txt scripts/wheel/requirements.py ./
COPY clients/python/pyproject.toml clients/python/
ARG VARIANT=cpu
RUN python3 -m venv /build \
 && /build/bin/pip install --no-cache-dir -q -c constraints.txt hatchling grpcio-tools googleapis-common-protos \
 && python3 -m venv --without-pip /venv \
 && /build/bin/python requirements.py ${VARIANT} >/tmp/requirements.txt \
 && /build/bin/pip --python /venv/bin/python install --no-cache-dir -q -c constraints.txt --no-compile \
        -r /tmp/requirements.txt \
 && find /venv -depth -type d \( -name tests -o -name testing -o -name include \) -path '*/numpy/*' -exec rm -rf {} + \
 # What one service alone needs: --outer of the daemon, and the engine's tokenizers. The latter can download from a hub,
 # with a client that nothing here calls: it comes without what it needs for that.
 && /build/bin/pip --python /venv/bin/python install --no-cache-dir -q -c constraints.txt --no-compile --no-deps \
        --target /text tokenizers \
 && /build/bin/python requirements.py tiers >/tmp/tiers.txt \
 && /build/bin/pip --python /venv/bin/python install --no-cache-dir -q -c constraints.txt --no-compile --target /tiers \
        -r /tmp/tiers.txt \
 && rm -rf /tiers/bin /tiers/google /tiers/protobuf-* /tiers/typing_extensions* \
 && strip --strip-unneeded $(find /venv /tiers /text \( -path '*/uvloop/*.so' -o -path '*/tokenizers/*.so' \
        -o -path '*/bindings/_rust*.so' \)) \
 && find /venv /tiers /text \( -name '*.pyi' -o -name '*.pxd' -o -name '*.a' \) -delete \
 # The root file system is read-only at run time, so the byte code is written now.
 && /venv/bin/python -m compileall -q --invalidation-mode unchecked-hash /venv/lib /tiers /text \
 && printf '/app\n/tiers\n/text\n' >"$(/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/app.pth"

FROM dependencies AS app
COPY . .
RUN /build/bin/pip wheel -q --no-deps --no-build-isolation -w /wheels . ./clients/python \
 && /build/bin/pip --python /venv/bin/python install -q --no-deps --no-index --no-compile --target /app /wheels/*.whl \
 && /venv/bin/python -m compileall -q --invalidation-mode unchecked-hash /app

FROM python AS base
# Nobody's name, no home, no shell; the number is the one that docker-compose.yml gives its volumes to.
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin rocmforge
COPY --from=dependencies /venv /venv
# The one folder that stays: kernels that were compiled.
RUN install -d -o 10001 -g 10001 /var/cache/rocmforge
ENV PATH=/app/bin:/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY --from=app /app /app
COPY LICENSE /app/
ARG BASE
ARG VERSION=0.2.0
ARG REVISION=""
LABEL org.opencontainers.image.vendor="ROCmForge" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}"
USER 10001:10001

FROM base AS kvcache
LABEL org.opencontainers.image.title="rocmforge-kvcache" \
      org.opencontainers.image.description="The KV-cache daemon: owns the memory that holds KV pages, and shares it with engines"
ENTRYPOINT ["rocmforge-kvcache"]

FROM kvcache AS kvcache-tiers
COPY --from=dependencies /tiers /tiers

FROM base AS engine
COPY --from=dependencies /text /text
LABEL org.opencontainers.image.title="rocmforge-engine" \
      org.opencontainers.image.description="The inference engine: generates text with K and V in pages of the KV-cache daemon"
ENTRYPOINT ["rocmforge-engine"]
