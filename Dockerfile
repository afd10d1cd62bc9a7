# moequant on a CPU:
#
#   docker build -t moequant .
#   docker run --rm moequant
#   docker run --rm -v "$PWD:/work" moequant convert SOURCE OUT --format nvfp4
#
# The second command is the demo: every step on a small generated checkpoint, without a network.
FROM python:3.12-slim
# torch comes first and from there alone: beside PyPI, pip takes whichever is newer, and PyPI's has
# CUDA, which is 2 GB larger.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY . /src
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch \
    && pip install --no-cache-dir /src \
    && rm -r /src
WORKDIR /work
ENTRYPOINT ["moequant"]
CMD ["demo"]
