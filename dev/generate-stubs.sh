#!/usr/bin/env bash
# Generates the Python stubs of proto/ into the folder given (default: beside the protos).
# An old grpcio-tools is used on purpose: its stubs load on protobuf 5.27 up to 7.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-proto}
tools=.tools/stubs
if [ ! -x "$tools/bin/protoc-gen-mypy" ]; then
  python3 -m venv "$tools"
  "$tools/bin/pip" install -q --require-hashes -r requirements/stubs.txt
fi
export PATH="$PWD/$tools/bin:$PATH"
protoc() { "$tools/bin/python" -m grpc_tools.protoc -I proto "$@"; }
protoc --python_out="$out" --mypy_out=quiet:"$out" proto/muster/v1/*.proto proto/muster/etcd/v3/*.proto
protoc --grpc_python_out="$out" --mypy_grpc_out=quiet:"$out" proto/muster/v1/{barrier,coordinator,insight,local,rendezvous,run,session,store}.proto
