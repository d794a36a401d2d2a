# The image of Dataflow's workers, which is the image of the Flex template's launcher too: what plans a job and what
# works on it are then the same code. `make dataflow-image` builds and pushes it; see "Dataflow" in README.md.
#
# Own steps, or libraries that they need, go on top:
#   FROM REGION-docker.pkg.dev/PROJECT/gristmill/worker:VERSION
#   RUN pip install --no-cache-dir 'tensorflow>=2.17'
#   COPY my_steps.py /template/

# Python and Beam must be those of the environment that submits the job, or its functions cannot be loaded.
ARG PYTHON_VERSION=3.11
ARG BEAM_VERSION=2.77.0

# A static binary, the same for every Python.
FROM gcr.io/dataflow-templates-base/python311-template-launcher-base:20230622_RC00 AS launcher

FROM apache/beam_python${PYTHON_VERSION}_sdk:${BEAM_VERSION}
COPY --from=launcher /opt/google/dataflow/python_template_launcher /opt/google/dataflow/python_template_launcher

# The dependencies have a layer of their own, so that another version of the code is a small one. array-record decides
# the bytes of the shards: the plan names its version, so it is the submitting environment's, too.
ARG BEAM_VERSION
ARG ARRAY_RECORD_VERSION=0.8.6
WORKDIR /opt/gristmill
COPY setup.py pyproject.toml ./
RUN touch README.md \
    && pip install --no-cache-dir "apache-beam[gcp]==${BEAM_VERSION}" "array-record==${ARRAY_RECORD_VERSION}" ".[http]" \
    && pip check

COPY README.md ./
COPY pipelines/ pipelines/
COPY transforms/ transforms/
RUN pip install --no-cache-dir --no-deps --force-reinstall . \
    && rm -rf build *.egg-info \
    && pip check \
    && gristmill --version

# A script in a folder of its own starts a launched template: Python puts that folder first on its path, and modules of
# pipelines/ have the names of Python's own.
WORKDIR /opt/launcher
RUN printf '%s\n' 'import sys' '' 'from pipelines.flex_template import main' '' \
    'if __name__ == "__main__":' '    sys.exit(main())' > main.py
ENV FLEX_TEMPLATE_PYTHON_PY_FILE=/opt/launcher/main.py

# Where it runs: it finds configs and steps by relative paths.
WORKDIR /template
COPY configs/ configs/

# Workers start Beam's boot program, which needs root: it makes folders and an environment. The service that launches
# templates starts the launcher by its path.
ENTRYPOINT ["/opt/apache/beam/boot"]
