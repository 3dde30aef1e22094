#!/bin/bash
# The image's first program: runs what it is given, or, where Spark on Kubernetes starts an executor, that executor.
# Spark tells an executor everything by variables; their names are its interface to images.
set -euo pipefail

if [ "${1:-}" != executor ]; then
    exec "$@"
fi

options=()
number=0
name=SPARK_JAVA_OPT_0
while [ -n "${!name+set}" ]; do # one option each, in the order of their numbers
    options+=("${!name}")
    number=$((number + 1))
    name=SPARK_JAVA_OPT_$number
done

exec "${JAVA_HOME:+$JAVA_HOME/bin/}java" ${options[@]+"${options[@]}"} \
    "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
    -cp "${SPARK_CLASSPATH:+$SPARK_CLASSPATH:}$SPARK_HOME/jars/*" \
    org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
    --driver-url "$SPARK_DRIVER_URL" \
    --executor-id "$SPARK_EXECUTOR_ID" \
    --cores "$SPARK_EXECUTOR_CORES" \
    --app-id "$SPARK_APPLICATION_ID" \
    --hostname "$SPARK_EXECUTOR_POD_IP" \
    --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
    --podName "$SPARK_EXECUTOR_POD_NAME"
