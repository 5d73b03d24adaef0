# The tracking server of compose.yaml: MLflow with users, Postgres and S3, at the versions of constraints.txt.
FROM python:3.11.14-slim-trixie
COPY constraints.txt /tmp/constraints.txt
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt boto3 "mlflow[auth]" "psycopg[binary]" \
    && useradd --create-home --uid 1000 mlflow
COPY --chmod=755 cluster/mlflow/serve.sh /usr/local/bin/serve.sh
USER 1000
WORKDIR /home/mlflow
ENTRYPOINT ["serve.sh"]
