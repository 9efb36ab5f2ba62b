#!/usr/bin/env bash
# The committed stubs must be what the protos generate, and load on the oldest supported libraries.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
dev/generate-stubs.sh "$fresh"
for stub in "$fresh"/muster/{v1,etcd/v3}/*; do
  if ! diff -u "proto/${stub#"$fresh"/}" "$stub"; then
    echo "The stubs in proto/ are not those of the protos. Run: make stubs" >&2
    exit 1
  fi
done
PYTHONPATH=proto .tools/stubs/bin/python - <<'PYTHON'
import grpc, google.protobuf
from muster.etcd.v3 import etcd_pb2
from muster.v1 import barrier_pb2_grpc, run_pb2_grpc, session_pb2_grpc, state_pb2
print(f"stubs are up to date, and load on grpcio {grpc.__version__}, protobuf {google.protobuf.__version__}")
PYTHON
