# docker build -t kvcatch . && docker run --rm kvcatch
FROM rust:1-slim AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir "maturin>=1.9.4,<2"
WORKDIR /src
COPY . .
RUN /opt/build/bin/maturin build --release --out /dist

FROM python:3.13-slim
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    pip install --no-cache-dir "$(echo /dist/*.whl)[report]"
USER nobody
ENTRYPOINT ["kvcatch"]
CMD ["bench"]
